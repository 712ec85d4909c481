"""Behaviour cloning, with Muon for the matrices and names exchanged at random."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trial_ray.process import advance
from trial_ray.warmstart.policy import Policy
from trial_ray.warmstart.settings import WarmStartSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial: the published ones, under which singular values end between 0.7 and 1.2."""
ITERATIONS = 5
LEAST_NORM = 1e-7
WARMUP = 30
"""Updates until the highest learning rate."""


class Muon(torch.optim.Optimizer):
    """Steps by orthogonal matrices of the momentum's directions, as ``torch.optim.Muon`` without weight decay.

    Args:
        matrices: what is trained; parameters of two dimensions, of one type and on one device.
        lr: learning rate, of a matrix of ``R`` rows and ``C`` columns times ``sqrt(max(1, R / C))``.
        momentum: of Nesterov's kind.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's may compute and return a loss
        """Do one update of the matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    state = self.state[matrix]
                    if not state:
                        state["momentum"] = torch.zeros_like(matrix)
                    average = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                    update = matrix.grad.lerp(average, group["momentum"])
                    wide = update if len(update) <= update.shape[1] else update.T
                    by_shape[wide.shape].append((matrix, wide))
            for trained in by_shape.values():
                steps = orthogonalized(torch.stack([wide for _, wide in trained]))
                for (matrix, _), step in zip(trained, steps, strict=True):
                    rows, columns = matrix.shape
                    rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                    matrix.add_(step if rows <= columns else step.T, alpha=-rate)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Bring all singular values near 1, by Newton-Schulz iterations: ``U Vᵀ`` of ``U S Vᵀ``, roughly.

    Args:
        matrices: ``[N, R, C]`` with ``R <= C``; iterated in float32 on a CPU, elsewhere in bfloat16.

    Returns:
        ``[N, R, C]``, of the same type.
    """
    a, b, c = COEFFICIENTS
    iterated = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    iterated = iterated / iterated.norm(dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = iterated @ iterated.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        iterated = torch.baddbmm(iterated, polynomial, iterated, beta=a)
    return iterated.to(matrices.dtype)


class Renamer:
    """Exchanges names within their kind, the same way throughout one example.

    A small model first learns which names are common ("desks have desk lamps") and then names things that are not there.
    Where names are exchanged at random, that cannot help it. (No gain in success was measured; see docs/decisions.md.)

    Args:
        tokenizer: names that are not one token to it stay as they are.
        groups: names that may stand for each other.
        probability: share of examples in which names are exchanged.
    """

    def __init__(self, tokenizer: Any, groups: Sequence[Sequence[str]], probability: float) -> None:
        self._probability, self._size = probability, len(tokenizer)
        self._forms: list[np.ndarray] = []
        """Of each group, token ids of its names without and with the blank before them, int64 ``[names, 2]``."""
        for names in groups:
            forms = [
                [tokenizer.encode(blank + name, add_special_tokens=False) for blank in ("", " ")] for name in names
            ]
            single = [[bare[0], spaced[0]] for bare, spaced in forms if len(bare) == len(spaced) == 1]
            self._forms.append(np.array(single, np.int64).reshape(-1, 2))

    def table(self, generator: np.random.Generator) -> np.ndarray:
        """A random exchange of names, int32 ``[vocabulary]``: new id of every id."""
        table = np.arange(self._size, dtype=np.int32)
        for forms in self._forms:
            table[forms] = forms[generator.permutation(len(forms))]
        return table

    def apply(self, example: Example, generator: np.random.Generator) -> Example:
        """The example, or one with other names."""
        if generator.random() >= self._probability:
            return example
        table = self.table(generator)
        return Example(table[example.prompt_ids], table[example.response_ids])


CHUNK_BATCHES = 32
"""Rows of so many batches are sorted by length together, so that a batch pads little and stays random."""


@dataclass(frozen=True, slots=True)
class Example:
    """One decision to imitate.

    Attributes:
        prompt_ids: int32 ``[P]``, the prompt, or its hindsight view.
        response_ids: int32 ``[y]``, the demonstrated response, end token included.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray

    def __len__(self) -> int:
        """Tokens in prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


class Batch(NamedTuple):
    """Examples side by side, padded on the right.

    Attributes:
        ids: int64 ``[B, L]``; zeros behind the examples.
        response: bool ``[B, L]``, tokens of responses.
        prompt: bool ``[B, L]``, tokens of prompts.
    """

    ids: torch.Tensor
    response: torch.Tensor
    prompt: torch.Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right; padding is in neither mask, and causal attention never looks there."""
    rows = [torch.from_numpy(np.concatenate((each.prompt_ids, each.response_ids))).long() for each in examples]
    ids = pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1])
    splits, ends = torch.tensor([[len(each.prompt_ids), len(each)] for each in examples]).T[:, :, None]
    return Batch(ids, (splits <= places) & (places < ends), places < splits)


def batches(
    examples: Sequence[Example], size: int, renamer: Renamer, generator: np.random.Generator
) -> Iterator[Batch]:
    """Yield batches without end: every epoch in a new order, rows of like length together."""
    while True:
        order = generator.permutation(len(examples))
        for start in range(0, len(order), size * CHUNK_BATCHES):
            chunk = sorted(order[start : start + size * CHUNK_BATCHES], key=lambda index: len(examples[index]))
            groups = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            for group in generator.permutation(len(groups)):
                yield collate([renamer.apply(examples[index], generator) for index in groups[group]])


def cloning_loss(model: PreTrainedModel, batch: Batch, prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean negative log-likelihood of response tokens plus ``prompt_weight`` times that of prompt tokens.

    Returns:
        The loss, and the share of responses whose every token is the most likely one (detached); both scalars.
    """
    response, prompt = batch.response[:, 1:], batch.prompt[:, 1:]
    # The head of a pretrained model costs as much as its layers; rows of like length have their responses in the same columns.
    columns = (response | prompt if prompt_weight else response).any(0).nonzero().squeeze(-1)
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False, logits_to_keep=columns).logits.float()
    targets, response, prompt = batch.ids[:, 1:][:, columns], response[:, columns], prompt[:, columns]
    nll = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    loss = nll[response].mean()
    if prompt_weight:
        loss = loss + prompt_weight * nll[prompt].mean()
    right = (logits.detach().argmax(-1) == targets) | ~response
    return loss, right.all(-1).float().mean()


def make_optimizers(model: PreTrainedModel, settings: WarmStartSettings) -> list[torch.optim.Optimizer]:
    """The optimizers over all trainable parameters: with ``muon``, Muon for the matrices of the layers and AdamW for the rest."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    # Embeddings are lookup tables, whose updates Muon would spoil.
    muon = [name for name, each in trained.items() if each.dim() == 2 and ".layers." in name]
    muon = muon if settings.optimizer == "muon" else []
    others = [each for name, each in trained.items() if name not in muon]
    adamw = torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    matrices = [trained[name] for name in muon]
    return [Muon(matrices, lr=settings.matrix_learning_rate), adamw] if matrices else [adamw]


def updates(policy: Policy, examples: Sequence[Example]) -> Iterator[tuple[float, float]]:
    """Update the model on cloning batches, once for each update that is asked for.

    Args:
        policy: whose model is trained in place.
        examples: demonstrated decisions.

    Yields:
        The loss, and the share of responses that were wholly right.
    """
    settings, model = policy.settings, policy.model
    interchangeable = policy.entry.adapter.warm_start.interchangeable
    renamer = Renamer(policy.tokenizer, interchangeable, settings.renaming_probability)
    optimizers = make_optimizers(model, settings)
    decay = max(1, settings.max_steps - WARMUP)
    # Linear warm-up, then linear decay to zero.
    schedulers = [
        LambdaLR(each, lambda step: min((step + 1) / WARMUP, max(0.0, (settings.max_steps - step) / decay)))
        for each in optimizers
    ]
    generator = np.random.default_rng([settings.seed, 2])
    for each in batches(examples, settings.batch_size, renamer, generator):
        model.train()  # a check may have been played meanwhile
        batch = Batch(*(part.to(model.device) for part in each))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.compute_dtype == "bfloat16"):
            loss, right = cloning_loss(model, batch, settings.prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        advance()
        yield loss.item(), right.item()

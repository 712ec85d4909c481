"""Behaviour cloning, with Muon for the matrices and names exchanged at random."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trial_ray.process import advance
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
        matrices: what is trained; parameters of two dimensions.
        lr: learning rate, of a matrix of ``R`` rows and ``C`` columns times ``sqrt(max(1, R / C))``.
        momentum: of Nesterov's kind.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's may compute and return a loss
        """Do one update of the matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    rows, columns = sorted(matrix.shape)
                    update = self._nesterov(matrix, matrix.grad, group["momentum"])
                    by_shape[rows, columns, matrix.device, matrix.dtype].append((matrix, update))
            for trained in by_shape.values():
                wide = torch.stack([update if _is_wide(update) else update.T for _, update in trained])
                for (matrix, _), step in zip(trained, orthogonalized(wide), strict=True):
                    rows, columns = matrix.shape
                    rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                    matrix.add_(step if _is_wide(matrix) else step.T, alpha=-rate)

    def _nesterov(self, matrix: torch.Tensor, gradient: torch.Tensor, momentum: float) -> torch.Tensor:
        """The direction ``[R, C]`` of the next update, before it is made orthogonal."""
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        average = state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def _is_wide(matrix: torch.Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


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
        self._probability = probability
        self._size = len(tokenizer)
        self._forms = [self._ids(tokenizer, names) for names in groups]

    @staticmethod
    def _ids(tokenizer: Any, names: Sequence[str]) -> np.ndarray:
        """Token ids of each name without and with the blank before it, int64 ``[names, 2]``."""
        forms = [[tokenizer.encode(blank + name, add_special_tokens=False) for blank in ("", " ")] for name in names]
        single = [(bare[0], spaced[0]) for bare, spaced in forms if len(bare) == len(spaced) == 1]
        return np.array(single, np.int64).reshape(-1, 2)

    def table(self, generator: np.random.Generator) -> np.ndarray:
        """A random exchange of names, int32 ``[vocabulary]``: new id of every id."""
        table = np.arange(self._size, dtype=np.int32)
        for forms in self._forms:
            if len(forms):
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples side by side, padded on the right.

    Attributes:
        ids: int64 ``[B, L]``.
        response: bool ``[B, L]``, tokens of responses.
        prompt: bool ``[B, L]``, tokens of prompts.
    """

    ids: torch.Tensor
    response: torch.Tensor
    prompt: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(self.ids.to(device), self.response.to(device), self.prompt.to(device))


def pad_id_of(tokenizer: Any) -> int:
    """The id that fills batches: the tokenizer's own, else that of its end token."""
    pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad_id


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Pad examples on the right; padding is in neither mask."""
    width = max(map(len, examples))
    ids = torch.full((len(examples), width), pad_id, dtype=torch.int64)
    response = torch.zeros(len(examples), width, dtype=torch.bool)
    prompt = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        split, end = len(example.prompt_ids), len(example)
        ids[row, :split] = torch.from_numpy(example.prompt_ids)
        ids[row, split:end] = torch.from_numpy(example.response_ids)
        prompt[row, :split] = True
        response[row, split:end] = True
    return Batch(ids, response, prompt)


def batches(
    examples: Sequence[Example], size: int, pad_id: int, renamer: Renamer, generator: np.random.Generator
) -> Iterator[Batch]:
    """Yield batches without end: every epoch in a new order, rows of like length together."""
    while True:
        order = generator.permutation(len(examples))
        for start in range(0, len(order), size * CHUNK_BATCHES):
            chunk = sorted(order[start : start + size * CHUNK_BATCHES], key=lambda index: len(examples[index]))
            groups = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            for group in generator.permutation(len(groups)):
                yield collate([renamer.apply(examples[index], generator) for index in groups[group]], pad_id)


def cloning_loss(model: PreTrainedModel, batch: Batch, prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean negative log-likelihood of response tokens plus ``prompt_weight`` times that of prompt tokens.

    Padding is on the right, where causal attention never looks, so no attention mask is needed.

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


def learning_rate_scale(step: int, steps: int) -> float:
    """Factor of the learning rates at an update (from 0): linear warm-up, then linear decay to zero at ``steps``."""
    return min((step + 1) / WARMUP, max(0.0, (steps - step) / max(1, steps - WARMUP)))


def make_optimizers(model: PreTrainedModel, settings: WarmStartSettings) -> list[torch.optim.Optimizer]:
    """The optimizers over all trainable parameters: with ``muon``, Muon for the matrices of the layers and AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # Embeddings are lookup tables, whose updates Muon would spoil.
            (matrices if parameter.dim() == 2 and ".layers." in name else others).append(parameter)
    if settings.optimizer == "adamw":
        matrices, others = [], [*matrices, *others]
    adamw = torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    return [Muon(matrices, lr=settings.matrix_learning_rate), adamw] if matrices else [adamw]


class Cloner:
    """Updates a model on cloning batches; ``step`` is one update.

    Args:
        model: trained in place.
        tokenizer: its tokenizer.
        examples: demonstrated decisions.
        interchangeable: groups of names that may be exchanged in the examples.
        settings: optimizer, batches and seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        examples: Sequence[Example],
        interchangeable: Sequence[Sequence[str]],
        settings: WarmStartSettings,
    ) -> None:
        self._model = model.train()
        self._prompt_weight, self._compute_dtype = settings.prompt_weight, settings.compute_dtype
        self._batches = batches(
            examples,
            settings.batch_size,
            pad_id_of(tokenizer),
            Renamer(tokenizer, interchangeable, settings.renaming_probability),
            np.random.default_rng([settings.seed, 2]),
        )
        self._optimizers = make_optimizers(model, settings)
        scale = partial(learning_rate_scale, steps=settings.max_steps)
        self._schedulers = [LambdaLR(optimizer, scale) for optimizer in self._optimizers]

    def step(self) -> tuple[float, float]:
        """Do one update; return the loss and the share of responses that were wholly right."""
        batch = next(self._batches).to(self._model.device)
        with torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._compute_dtype == "bfloat16"):
            loss, right = cloning_loss(self._model, batch, self._prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        advance()
        return loss.item(), right.item()

"""Behaviour cloning: the Muon optimizer, data augmentation that exchanges names within an example, batches, and losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trial_ray.models.layout import pack_sequences
from trial_ray.models.logprobs import sequence_logprobs
from trial_ray.models.prefix_tree import PrefixOrder, ScoredSequence
from trial_ray.process import advance
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.warmstart.policy import Policy
from trial_ray.warmstart.settings import WarmStartSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that Newton-Schulz iterations apply to singular values, as published with Muon."""
ITERATIONS = 5
MOMENTUM = 0.95
"""Nesterov momentum of Muon."""
MIN_NORM = 1e-7
WARMUP = 30
"""Number of updates of the learning rate's warm-up."""
BatchLoss = Callable[[PreTrainedModel, Any, float], tuple[Tensor, Tensor]]
"""Function of a model, a batch and the weight of prompt tokens.

It returns the model's loss on the batch, and the share of responses with all tokens correct.
"""


class Muon(torch.optim.Optimizer):
    """Optimizer that updates matrices with their orthogonalized momentum, like ``torch.optim.Muon`` without weight decay.

    Args:
        matrices: trained parameters with two dimensions, of the same dtype and on the same device.
        lr: learning rate; for a matrix with ``R`` rows and ``C`` columns it is multiplied by ``sqrt(max(1, R / C))``.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the base class may return a loss
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    state = self.state[matrix]
                    if not state:
                        state["momentum"] = torch.zeros_like(matrix)
                    average = state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
                    update = matrix.grad.lerp(average, MOMENTUM)
                    wide = update if len(update) <= update.shape[1] else update.T
                    by_shape[wide.shape].append((matrix, wide))
            for trained in by_shape.values():
                steps = orthogonalized(torch.stack([wide for _, wide in trained]))
                for (matrix, _), step in zip(trained, steps, strict=True):
                    rows, columns = matrix.shape
                    rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                    matrix.add_(step if rows <= columns else step.T, alpha=-rate)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Orthogonalize matrices ``U S Vᵀ`` by Newton-Schulz iterations: return about ``U Vᵀ``.

    Singular values become about 0.7 to 1.2, except for those below 0.2 % of the matrix's Frobenius norm, which stay smaller.

    Args:
        matrices: ``[N, R, C]`` with ``R <= C``; computed in float32 on a CPU, in bfloat16 on other devices.

    Returns:
        ``[N, R, C]``, of the same dtype.
    """
    a, b, c = COEFFICIENTS
    iterated = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    iterated = iterated / iterated.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        gram = iterated @ iterated.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        iterated = torch.baddbmm(iterated, polynomial, iterated, beta=a)
    return iterated.to(matrices.dtype)


class Renamer:
    """Exchanges names within groups of similar names at random, in the same way everywhere in an example.

    A small model first learns which names are frequent in a context, such as desk lamps near desks, and then mentions objects
    that are not present. Exchanged names make such guesses useless. (No gain in success was measured; see docs/decisions.md.)

    Args:
        tokenizer: tokenizer of the policy; names that are not a single token are not exchanged.
        groups: groups of names that can replace each other.
        probability: share of examples with exchanged names.
    """

    def __init__(self, tokenizer: Any, groups: Sequence[Sequence[str]], probability: float) -> None:
        self._probability, self._size = probability, len(tokenizer)
        self._forms: list[np.ndarray] = []
        """Token ids, int64 ``[names, 2]``, of each group of exchangeable names: without and with a leading blank."""
        for names in groups:
            forms = [
                [tokenizer.encode(blank + name, add_special_tokens=False) for blank in ("", " ")] for name in names
            ]
            single = [[bare[0], spaced[0]] for bare, spaced in forms if len(bare) == len(spaced) == 1]
            self._forms.append(np.array(single, np.int64).reshape(-1, 2))

    def table(self, generator: np.random.Generator) -> np.ndarray:
        """Draw a random exchange of names: the new id of every token id, int32 ``[vocabulary]``."""
        table = np.arange(self._size, dtype=np.int32)
        for forms in self._forms:
            table[forms] = forms[generator.permutation(len(forms))]
        return table

    def apply(self, example: Example, generator: np.random.Generator) -> Example:
        """Return the example or, with the renamer's probability, a copy with exchanged names."""
        if generator.random() >= self._probability:
            return example
        table = self.table(generator)
        return Example(table[example.prompt_ids], table[example.response_ids])


CHUNK_BATCHES = 32
"""Number of batches whose examples are sorted by length together, so that batches have little padding but stay random."""


@dataclass(frozen=True, slots=True)
class Example:
    """One decision to imitate.

    Attributes:
        prompt_ids: int32 ``[P]``, the prompt, with or without teacher context.
        response_ids: int32 ``[y]``, the demonstrated response, including the end token.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray

    def __len__(self) -> int:
        """Total number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


class Batch(NamedTuple):
    """A batch of examples, padded on the right.

    Attributes:
        ids: int64 ``[B, L]``, token ids, padded with zeros.
        response: bool ``[B, L]``, mask of the response tokens.
        prompt: bool ``[B, L]``, mask of the prompt tokens.
    """

    ids: Tensor
    response: Tensor
    prompt: Tensor


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right; both masks are False for padding. No attention mask is needed, because attention is causal."""
    rows = [torch.from_numpy(np.concatenate((example.prompt_ids, example.response_ids))).long() for example in examples]
    ids = pad_sequence(rows, batch_first=True)
    places = torch.arange(ids.shape[1])
    splits, ends = torch.tensor([[len(example.prompt_ids), len(example)] for example in examples]).T[:, :, None]
    return Batch(ids, (splits <= places) & (places < ends), places < splits)


def batches(
    examples: Sequence[Example], size: int, renamer: Renamer, generator: np.random.Generator
) -> Iterator[Batch]:
    """Yield batches indefinitely, in a new order in every epoch, with examples of similar length in a batch."""
    while True:
        order = generator.permutation(len(examples))
        for start in range(0, len(order), size * CHUNK_BATCHES):
            chunk = sorted(order[start : start + size * CHUNK_BATCHES], key=lambda index: len(examples[index]))
            groups = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            for group in generator.permutation(len(groups)):
                yield collate([renamer.apply(examples[index], generator) for index in groups[group]])


def cloning_loss(model: PreTrainedModel, batch: Batch, prompt_weight: float) -> tuple[Tensor, Tensor]:
    """Return the mean negative log-likelihood of response tokens plus ``prompt_weight`` times the mean over prompt tokens.

    Returns:
        The loss, and the share of responses in which every token is the most likely token (detached); both scalars.
    """
    batch = Batch(*(part.to(model.device) for part in batch))
    response, prompt = batch.response[:, 1:], batch.prompt[:, 1:]
    # The output head costs as much as the layers, so compute it only for positions that are a target in at least one row.
    columns = (response | prompt if prompt_weight else response).any(0).nonzero().squeeze(-1)
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False, logits_to_keep=columns).logits.float()
    targets, response, prompt = batch.ids[:, 1:][:, columns], response[:, columns], prompt[:, columns]
    nll = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    loss = nll[response].mean()
    if prompt_weight:
        loss = loss + prompt_weight * nll[prompt].mean()
    right = (logits.detach().argmax(-1) == targets) | ~response
    return loss, right.all(-1).float().mean()


def conversation_batches(
    examples: Sequence[Example], size: int, renamer: Renamer, generator: np.random.Generator
) -> Iterator[list[Example]]:
    """Yield batches indefinitely; the examples of a batch share long prefixes, like neighbouring turns of a conversation.

    The same names are exchanged in all examples of a batch, or in none.
    """
    order = PrefixOrder([_scored(example) for example in examples]).order
    while True:
        # The boundaries of batches, which may split a conversation, differ in every epoch.
        first = int(generator.integers(min(size, len(order))))
        groups = [group for group in np.split(order, range(first, len(order), size)) if len(group)]
        for index in generator.permutation(len(groups)):
            seed = int(generator.integers(2**63))
            yield [renamer.apply(examples[row], np.random.default_rng(seed)) for row in groups[index]]


def shared_prefix_loss(
    model: PreTrainedModel, examples: Sequence[Example], prompt_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the same loss as :func:`cloning_loss`, but compute shared prefixes of the examples once.

    Returns:
        The loss, and the share of responses in which every token has a probability above one half (detached); both scalars.
    """
    sequences = [_scored(example, with_prompt=prompt_weight > 0) for example in examples]
    order = PrefixOrder(sequences)
    logprobs = sequence_logprobs(model, pack_sequences(model, order, order.num_distinct)).split(
        [sequence.num_targets for sequence in sequences]
    )
    responses = [row[-len(example.response_ids) :] for row, example in zip(logprobs, examples, strict=True)]
    loss = -torch.cat(responses).mean()
    if prompt_weight:
        prompts = [row[: -len(example.response_ids)] for row, example in zip(logprobs, examples, strict=True)]
        loss = loss - prompt_weight * torch.cat(prompts).mean()
    return loss, torch.stack([(row.detach().exp() > 0.5).all() for row in responses]).float().mean()


def _scored(example: Example, with_prompt: bool = False) -> ScoredSequence:
    """Return the example as a sequence whose response or, if ``with_prompt``, every token except the first is scored."""
    ids = np.concatenate((example.prompt_ids, example.response_ids))
    return ScoredSequence(ids, len(ids) - 1 if with_prompt else len(example.response_ids))


def make_optimizers(model: PreTrainedModel, settings: WarmStartSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers of all trainable parameters: with ``muon``, Muon for matrices in layers and AdamW for the rest."""
    # Embeddings are lookup tables: orthogonalized updates would also change the rows of tokens that a batch lacks.
    trained = [
        (settings.optimizer == "muon" and parameter.dim() == 2 and ".layers." in name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    matrices = [parameter for by_muon, parameter in trained if by_muon]
    others = [parameter for by_muon, parameter in trained if not by_muon]
    adamw = torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    return [Muon(matrices, lr=settings.matrix_learning_rate), adamw] if matrices else [adamw]


def updates(policy: Policy, examples: Sequence[Example]) -> Iterator[tuple[float, float]]:
    """Update the model on cloning batches, one update for each item that is requested.

    Args:
        policy: policy with the model, which is trained in place.
        examples: demonstrated decisions.

    Yields:
        The loss, and the share of responses with all tokens correct.
    """
    settings, model = policy.settings, policy.model
    interchangeable = policy.entry.adapter.warm_start.interchangeable
    renamer = Renamer(policy.tokenizer, interchangeable, settings.renaming_probability)
    decay = max(1, settings.max_steps - WARMUP)
    # Linear warm-up, then linear decay to zero.
    schedulers = [
        LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, max(0.0, (settings.max_steps - step) / decay)))
        for optimizer in make_optimizers(model, settings)
    ]
    generator = np.random.default_rng([settings.seed, 2])
    in_conversations = isinstance(policy.builder, ToolConversationBuilder)
    make_batches = conversation_batches if in_conversations else batches
    compute_loss: BatchLoss = shared_prefix_loss if in_conversations else cloning_loss
    for batch in make_batches(examples, settings.batch_size, renamer, generator):
        model.train()  # A check before this update may have set evaluation mode.
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.compute_dtype == "bfloat16"):
            loss, right = compute_loss(model, batch, settings.prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for scheduler in schedulers:
            scheduler.optimizer.step()
            scheduler.optimizer.zero_grad()
            scheduler.step()
        advance()
        yield loss.item(), right.item()

"""Behaviour cloning: maximise the likelihood of demonstrated responses, and a little of the prompts before them.

The loss on the prompt teaches copying: names recur all over a prompt, and predicting their second occurrence forms the
same attention heads that a response needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trial_ray.process_progress import advance
from trial_ray.warmstart.muon import Muon
from trial_ray.warmstart.renaming import Renamer

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


@dataclass(frozen=True, slots=True)
class Renaming:
    """How often, and by what, the names in an example are exchanged; see :class:`Renamer`."""

    renamer: Renamer
    probability: float

    def apply(self, example: Example, generator: np.random.Generator) -> Example:
        """The example, or one with other names."""
        if generator.random() >= self.probability:
            return example
        table = self.renamer.table(generator)
        return Example(table[example.prompt_ids], table[example.response_ids])


def batches(
    examples: Sequence[Example], size: int, pad_id: int, renaming: Renaming, generator: np.random.Generator
) -> Iterator[Batch]:
    """Yield batches without end: every epoch in a new order, rows of like length together."""
    while True:
        order = generator.permutation(len(examples))
        for start in range(0, len(order), size * CHUNK_BATCHES):
            chunk = sorted(order[start : start + size * CHUNK_BATCHES], key=lambda index: len(examples[index]))
            groups = [chunk[first : first + size] for first in range(0, len(chunk), size)]
            for group in generator.permutation(len(groups)):
                yield collate([renaming.apply(examples[index], generator) for index in groups[group]], pad_id)


def cloning_loss(model: PreTrainedModel, batch: Batch, prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean negative log-likelihood of response tokens plus ``prompt_weight`` times that of prompt tokens.

    Padding is on the right, where causal attention never looks, so no attention mask is needed.

    Returns:
        The loss, and the share of responses whose every token is the most likely one (detached); both scalars.
    """
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits.float()
    targets = batch.ids[:, 1:]
    nll = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    response, prompt = batch.response[:, 1:], batch.prompt[:, 1:]
    loss = nll[response].mean() + prompt_weight * nll[prompt].mean()
    right = (logits.detach().argmax(-1) == targets) | ~response
    return loss, right.all(-1).float().mean()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates: linear warm-up, then linear decay to zero at ``steps``.

    Attributes:
        optimizer: ``muon`` (matrices of the layers; AdamW for the rest) or ``adamw``.
        learning_rate: of AdamW, at its highest.
        matrix_learning_rate: of Muon, at its highest.
        steps: updates in all.
        warmup: updates until the highest rate.
    """

    optimizer: str
    learning_rate: float
    matrix_learning_rate: float
    steps: int
    warmup: int = 30

    def scale(self, step: int) -> float:
        """Factor of the learning rates at an update (from 0)."""
        return min((step + 1) / self.warmup, max(0.0, (self.steps - step) / max(1, self.steps - self.warmup)))

    def build(self, model: PreTrainedModel) -> list[torch.optim.Optimizer]:
        """The optimizers over all trainable parameters."""
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = [parameter for name, parameter in trained if _is_layer_matrix(name, parameter)]
        others = [parameter for name, parameter in trained if not _is_layer_matrix(name, parameter)]
        if self.optimizer == "adamw":
            matrices, others = [], [*matrices, *others]
        adamw = torch.optim.AdamW(others, lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
        if not matrices:
            return [adamw]
        return [Muon(matrices, lr=self.matrix_learning_rate), adamw]


def _is_layer_matrix(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside a layer: embeddings are lookup tables, whose updates Muon would spoil."""
    return parameter.dim() == 2 and ".layers." in name


class Cloner:
    """Updates a model on cloning batches; ``step`` is one update.

    Args:
        model: trained in place.
        examples: what to imitate.
        schedule: optimizers and learning rates.
        pad_id: fills batches on the right.
        batch_size: examples in an update.
        prompt_weight: weight of the loss on prompt tokens.
        renaming: exchange of names in the examples.
        seed: of the order of examples, and of the renaming.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        examples: Sequence[Example],
        schedule: Schedule,
        *,
        pad_id: int,
        batch_size: int,
        prompt_weight: float,
        renaming: Renaming,
        seed: int,
    ) -> None:
        self._model = model.train()
        self._batches = batches(examples, batch_size, pad_id, renaming, np.random.default_rng([seed, 2]))
        self._prompt_weight = prompt_weight
        self._optimizers = schedule.build(model)
        self._schedulers = [LambdaLR(optimizer, schedule.scale) for optimizer in self._optimizers]

    def step(self) -> tuple[float, float]:
        """Do one update; return the loss and the share of responses that were wholly right."""
        batch = next(self._batches).to(self._model.device)
        loss, right = cloning_loss(self._model, batch, self._prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        advance("cloning update")
        return loss.item(), right.item()

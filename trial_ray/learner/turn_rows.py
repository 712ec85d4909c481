"""Turn rows: the learner's unit of data, first as a table of turns, then as padded columns, then as flat tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trial_ray.learner.packing import Row
from trial_ray.rollout.trajectory import Turn

Columns = dict[str, torch.Tensor]

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class TurnRows:
    """K turns of one update, in task order; the connector pieces fill the fields one after the other.

    Attributes:
        turns: the K turns.
        trajectory_ids: int64 ``[K]``, index of each turn's trajectory.
        advantages: float32 ``[K]``, group-relative advantage of the turn's trajectory, less the penalty for a reply
            without the required form.
        evidence_ids: K arrays int32 ``[z_k]``; empty where no hindsight view is used.
        logprobs: float32 ``[T]``, log π_old(y|h) as the learner scores it, all turns' tokens laid end to end.
        hindsight_logprobs: float32 ``[T]``, log π_T(y|h⁺), or ``None``.
        reference_logprobs: float32 ``[T]`` under the frozen initial policy, or ``None``.
        weights: float32 ``[K]``, turn weights w_k (Eq. 6), or ``None``.
        action_mask: bool ``[T]``, tokens that spell the action, or ``None``.
        keep_evidence: whether the training forward needs the hindsight view too.
    """

    turns: list[Turn]
    trajectory_ids: torch.Tensor
    advantages: torch.Tensor
    evidence_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: torch.Tensor | None = None
    hindsight_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None
    keep_evidence: bool = False

    def __len__(self) -> int:
        return len(self.turns)

    @property
    def lengths(self) -> torch.Tensor:
        """Reply tokens of each turn, int64 ``[K]``."""
        return torch.tensor([len(turn.response_ids) for turn in self.turns])

    @property
    def turn_ids(self) -> torch.Tensor:
        """Turn of each token, int64 ``[T]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def model_rows(self) -> list[Row]:
        """The turns as model inputs."""
        evidence = self.evidence_ids or [_NO_TOKENS] * len(self)
        return [
            Row(turn.prompt_ids, turn.insert_at, turn.response_ids, ids)
            for turn, ids in zip(self.turns, evidence, strict=True)
        ]

    def columns(self) -> Columns:
        """Padded columns with the turn on axis 0, which is what RLlib can cut into minibatches.

        Padding is undone before every forward pass (:class:`TokenBatch`, :func:`rows_of`), so it costs no computation.
        """
        columns = {
            "prompt_ids": _pad([turn.prompt_ids for turn in self.turns]),
            "prompt_length": torch.tensor([len(turn.prompt_ids) for turn in self.turns]),
            "response_ids": _pad([turn.response_ids for turn in self.turns]),
            "response_length": self.lengths,
            "advantages": self.advantages.float(),
        }
        for name in ("logprobs", "hindsight_logprobs", "reference_logprobs"):
            if (values := getattr(self, name)) is not None:
                columns[name] = _pad_flat(values.float().cpu(), self.lengths)
        if self.action_mask is not None:
            columns["action_mask"] = _pad_flat(self.action_mask, self.lengths)
        if self.keep_evidence:
            columns["insert_at"] = torch.tensor([turn.insert_at for turn in self.turns])
            columns["evidence_ids"] = _pad(self.evidence_ids)
            columns["evidence_length"] = torch.tensor([len(ids) for ids in self.evidence_ids])
        if self.weights is not None:
            columns["weights"] = self.weights.float().cpu()
        return columns


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The tokens of a microbatch laid end to end: what the objective's functions take.

    Attributes:
        old_logprobs, advantages: float ``[T]``.
        mask: bool ``[T]``, the eligible tokens: every generated token.
        hindsight_logprobs, reference_logprobs, weights: float ``[T]``, or ``None`` where the method does not use them.
        action_mask: bool ``[T]``, or ``None``.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    hindsight_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    weights: torch.Tensor | None
    action_mask: torch.Tensor | None = None

    @classmethod
    def from_columns(cls, columns: Columns) -> TokenBatch:
        """Undo the padding."""
        lengths = columns["response_length"]
        inside = _inside(lengths, columns["response_ids"].shape[1])

        def flat(name: str) -> torch.Tensor | None:
            return columns[name][inside] if name in columns else None

        weights = columns.get("weights")
        return cls(
            old_logprobs=columns["logprobs"][inside],
            advantages=torch.repeat_interleave(columns["advantages"], lengths),
            mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=lengths.device),
            hindsight_logprobs=flat("hindsight_logprobs"),
            reference_logprobs=flat("reference_logprobs"),
            weights=None if weights is None else torch.repeat_interleave(weights, lengths),
            action_mask=flat("action_mask"),
        )


def rows_of(columns: Columns) -> list[Row]:
    """The turns in padded columns, without their padding; with their evidence where the columns hold it."""
    prompts, replies = columns["prompt_ids"].cpu().numpy(), columns["response_ids"].cpu().numpy()
    prompt_lengths, reply_lengths = columns["prompt_length"].tolist(), columns["response_length"].tolist()
    places, evidence = prompt_lengths, [_NO_TOKENS] * len(prompts)
    if "evidence_ids" in columns:
        padded, lengths = columns["evidence_ids"].cpu().numpy(), columns["evidence_length"].tolist()
        places, evidence = (
            columns["insert_at"].tolist(),
            [ids[:length] for ids, length in zip(padded, lengths, strict=True)],
        )
    return [
        Row(prompts[row, : prompt_lengths[row]], places[row], replies[row, : reply_lengths[row]], evidence[row])
        for row in range(len(prompts))
    ]


def split_columns(columns: Columns, rows: int) -> Iterator[Columns]:
    """Cut columns into consecutive pieces of at most ``rows`` turns."""
    for start in range(0, len(columns["response_length"]), rows):
        yield {name: column[start : start + rows] for name, column in columns.items()}


def _inside(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def _pad(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    padded = np.zeros((len(arrays), max(len(array) for array in arrays)), np.int32)
    for index, array in enumerate(arrays):
        padded[index, : len(array)] = array
    return torch.from_numpy(padded)


def _pad_flat(flat: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(len(lengths), int(lengths.max()), dtype=flat.dtype)
    padded[_inside(lengths, padded.shape[1])] = flat
    return padded

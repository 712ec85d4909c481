"""Turn rows: the learner's unit of data, first as a table of turns, then as the flat tokens of some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from trial_ray.errors import MethodError
from trial_ray.hindsight.aug import Evidence
from trial_ray.learner.packing import Row
from trial_ray.rollout.trajectory import Turn

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class TurnRows:
    """K turns of one update, in task order, T response tokens laid end to end; the connector pieces fill the fields.

    Attributes:
        turns: the K turns.
        trajectory_ids: int64 ``[K]``, index of each turn's trajectory.
        advantages: float ``[K]``, group-relative advantage of the turn's trajectory, less the penalty for a response without
            the required form.
        evidence: of the K turns; empty where no hindsight view is used.
        logprobs: float ``[T]``, log π_old(y|h) as the learner scores it; empty before.
        hindsight_logprobs: float ``[T]``, log π_T(y|h⁺), or ``None``.
        reference_logprobs: float ``[T]`` under the frozen initial policy, or ``None``.
        importance_weights: float ``[T]``, truncated ratio of log π_old to the engine's policy, or ``None`` for weights of 1.
        scores: float ``[K]``, turn scores s_k (Eq. 5), which are recorded, or ``None``.
        weights: float ``[K]``, turn weights w_k (Eq. 6), or ``None``.
        action_mask: bool ``[T]``, tokens that spell the action, or ``None``.
        mask: bool ``[T]``, the tokens to learn from; every generated token unless the method says otherwise.
    """

    turns: list[Turn]
    trajectory_ids: torch.Tensor
    advantages: torch.Tensor
    evidence: list[Evidence] = field(default_factory=list)
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    hindsight_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None
    mask: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = torch.ones(int(self.lengths.sum()), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.turns)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Response tokens of each turn, int64 ``[K]``."""
        return torch.tensor([len(turn.response_ids) for turn in self.turns], dtype=torch.int64)

    @cached_property
    def turn_ids(self) -> torch.Tensor:
        """Turn of each token, int64 ``[T]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def _token_starts(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.lengths.numpy()
        return np.cumsum(lengths) - lengths

    def token_positions(self, rows: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Positions of the tokens of ``rows`` among the T tokens, int64, in the order of ``rows``."""
        starts, lengths = self._token_starts, self.lengths.numpy()
        return torch.from_numpy(
            np.concatenate([_NO_TOKENS, *(np.arange(starts[row], starts[row] + lengths[row]) for row in rows)])
        ).long()

    def model_rows(self, rows: Sequence[int] | np.ndarray, with_evidence: bool = False) -> list[Row]:
        """Some turns as model inputs; ``with_evidence`` for those whose hindsight view is wanted too."""
        turns = self.turns
        if not with_evidence:
            return [Row(turns[row].prompt_ids, turns[row].insert_at, turns[row].response_ids) for row in rows]
        return [
            Row(turns[row].prompt_ids, self.evidence[row].insert_at, turns[row].response_ids, self.evidence[row].ids)
            for row in rows
        ]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The T tokens of K turns laid end to end (a microbatch, or a part of one): what the objective's functions take.

    Attributes:
        old_logprobs, advantages: float ``[T]``.
        mask: bool ``[T]``, the tokens to learn from.
        turn_ids: int64 ``[T]`` in ``[0, K)``, the turn of each token.
        trajectory_ids: int64 ``[K]``, the trajectory of each turn, the same numbers in every microbatch of an update.
        hindsight_logprobs, reference_logprobs, weights: float ``[T]``, or ``None`` where the method does not use them.
        importance_weights: float ``[T]``, what the tokens count in the surrogate, or ``None`` where each counts 1.
        action_mask: bool ``[T]``, or ``None``.
    """

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    turn_ids: torch.Tensor
    trajectory_ids: torch.Tensor
    hindsight_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    action_mask: torch.Tensor | None = None

    @classmethod
    def from_rows(cls, table: TurnRows, rows: Sequence[int] | np.ndarray, device: torch.device | str) -> TokenBatch:
        """The tokens of some rows on ``device``; floats in the dtype of the log-probabilities."""
        positions = table.token_positions(rows)
        index = torch.as_tensor(np.asarray(rows, np.int64))
        dtype = table.logprobs.dtype

        def tokens(values: torch.Tensor) -> torch.Tensor:
            return values[positions].to(device)

        def turns(values: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(values[index].to(dtype), table.lengths[index]).to(device)

        return cls(
            old_logprobs=tokens(table.logprobs),
            advantages=turns(table.advantages),
            mask=tokens(table.mask),
            turn_ids=torch.repeat_interleave(torch.arange(len(index)), table.lengths[index]).to(device),
            trajectory_ids=table.trajectory_ids[index].to(device),
            hindsight_logprobs=_where_given(tokens, table.hindsight_logprobs),
            reference_logprobs=_where_given(tokens, table.reference_logprobs),
            importance_weights=_where_given(tokens, table.importance_weights),
            weights=_where_given(turns, table.weights),
            action_mask=_where_given(tokens, table.action_mask),
        )


def required(values: torch.Tensor | None) -> torch.Tensor:
    """An optional field of :class:`TurnRows` or :class:`TokenBatch` that a method cannot do without.

    Raises:
        MethodError: it is ``None``.
    """
    if values is None:
        raise MethodError(
            "A method reads a field of its rows that is None, expected a tensor: hindsight_logprobs needs a privileged_view, "
            "action_mask the method's needs_action_spans, and weights are set by its prepare()."
        )
    return values


def _where_given(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else function(values)

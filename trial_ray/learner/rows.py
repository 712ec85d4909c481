"""Turns of an update as training samples (rows), and the tokens of some rows as the input of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trial_ray.config.run import RunSettings
from trial_ray.errors import MethodError
from trial_ray.learner.advantages import trajectory_ids_of
from trial_ray.models.prefix_tree import ScoredSequence
from trial_ray.objectives.advantages import batch_standardised
from trial_ray.objectives.segments import segment_sum
from trial_ray.prompts.teacher_context import augment
from trial_ray.trajectory import TrajectoryGroup, Turn


@dataclass
class TurnRows:
    """K turns of one update, group by group, and their T concatenated response tokens; ``Scoring`` adds log-probabilities.

    Attributes:
        turns: the K turns.
        trajectory_ids: int64 ``[K]``, index of each turn's trajectory.
        advantages: float ``[K]``, advantage of each turn by the method, see ``Method.advantages``.
        logprobs: float ``[T]``, the tokens' log π_old, computed by the learner before the update; empty until then.
        hindsight_logprobs: float ``[T]``, the tokens' log-probabilities under the teacher, or ``None`` without a teacher.
        reference_logprobs: float ``[T]``, the tokens' log-probabilities under the frozen initial policy, or ``None`` without a KL
            term.
        importance_weights: float ``[T]``, bounded ratios of π_old to the engine's policy (``importance_mode``), or ``None`` if all
            weights are 1.
        scores: float ``[K]``, turn scores s_k (TRIAL paper, Eq. 5), which are recorded, or ``None`` if the method has none.
        weights: float ``[K]``, turn weights w_k (TRIAL paper, Eq. 6), or ``None`` if the method has none.
        terms: float ``[T]``, terms that the method adds to the advantages of tokens, or ``None``.
        action_mask: bool ``[T]``, tokens of the action, or ``None`` if the method does not need them.
        mask: bool ``[T]``, the tokens to learn from; all generated tokens, unless the method or ``mask_truncated`` excludes some.
    """

    turns: list[Turn]
    trajectory_ids: Tensor
    advantages: Tensor
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    hindsight_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None
    terms: Tensor | None = None
    action_mask: Tensor | None = None
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = torch.ones(int(self.lengths.sum()), dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.turns)

    @cached_property
    def lengths(self) -> Tensor:
        """Number of response tokens of each turn, int64 ``[K]``."""
        return torch.tensor([len(turn.response_ids) for turn in self.turns], dtype=torch.int64)

    @cached_property
    def turn_ids(self) -> Tensor:
        """Index of the turn of each token, int64 ``[T]``."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    @cached_property
    def _turn_positions(self) -> tuple[Tensor, ...]:
        """Positions of each turn's response tokens in the concatenated tokens of all turns, int64."""
        return torch.arange(len(self.turn_ids)).split(self.lengths.tolist())

    def token_positions(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return the positions of the response tokens of ``rows`` in the concatenated tokens of all rows, int64."""
        # torch cannot concatenate an empty list, so begin with an empty tensor: `rows` may be empty.
        return torch.cat([torch.empty(0, dtype=torch.int64), *(self._turn_positions[row] for row in rows)])

    def num_eligible(self) -> NDArray[np.int64]:
        """Return for each turn the number of tokens to learn from, int64 ``[K]``."""
        return segment_sum(self.mask.long(), self.turn_ids, len(self)).numpy()

    def sequences(self, rows: Iterable[int], hindsight: bool = False) -> list[ScoredSequence]:
        """Return some rows as sequences (prompt and response) to score, with or without the teacher context in the prompt."""
        return [scored_turn(self.turns[row], hindsight=hindsight) for row in rows]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The concatenated T tokens of K turns (all or some turns of a microbatch), the input of the hooks that compute the loss.

    Attributes:
        old_logprobs, advantages: float ``[T]``, log-probabilities before the update, and advantages.
        mask: bool ``[T]``, the tokens to learn from.
        turn_ids: int64 ``[T]`` in ``[0, K)``, the turn of each token.
        trajectory_ids: int64 ``[K]``, the trajectory of each turn; trajectories are numbered over the whole update.
        hindsight_logprobs, reference_logprobs: float ``[T]``, as in :class:`TurnRows`.
        weights: float ``[T]``, the weight of each token's turn, or ``None`` if the method has none.
        importance_weights: float ``[T]``, weights of the tokens in the surrogate, or ``None`` for weights of 1.
        terms: float ``[T]``, terms that are added to the advantages of tokens, or ``None``.
        action_mask: bool ``[T]``, tokens of the action, or ``None`` if the method does not need them.
    """

    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    turn_ids: Tensor
    trajectory_ids: Tensor
    hindsight_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    weights: Tensor | None = None
    terms: Tensor | None = None
    action_mask: Tensor | None = None

    @property
    def num_turns(self) -> int:
        """K, the number of turns."""
        return len(self.trajectory_ids)

    @classmethod
    def from_rows(cls, table: TurnRows, rows: Sequence[int] | np.ndarray, device: torch.device | str) -> TokenBatch:
        """Return the tokens of some rows on ``device``; floats have the dtype of the log-probabilities."""
        positions, index = table.token_positions(rows), torch.as_tensor(np.asarray(rows, np.int64))
        lengths, dtype = table.lengths[index], table.logprobs.dtype

        def of_tokens(values: Tensor | None) -> Any:
            return None if values is None else values[positions].to(device)

        def of_turns(values: Tensor | None) -> Any:
            return None if values is None else torch.repeat_interleave(values[index].to(dtype), lengths).to(device)

        return cls(
            old_logprobs=of_tokens(table.logprobs),
            advantages=of_turns(table.advantages),
            mask=of_tokens(table.mask),
            turn_ids=torch.repeat_interleave(torch.arange(len(index)), lengths).to(device),
            trajectory_ids=table.trajectory_ids[index].to(device),
            hindsight_logprobs=of_tokens(table.hindsight_logprobs),
            reference_logprobs=of_tokens(table.reference_logprobs),
            importance_weights=of_tokens(table.importance_weights),
            weights=of_turns(table.weights),
            terms=of_tokens(table.terms),
            action_mask=of_tokens(table.action_mask),
        )


def scored_turn(turn: Turn, hindsight: bool = False) -> ScoredSequence:
    """Return a turn's prompt and response as a sequence, to compute the log-probabilities of the response.

    If ``hindsight`` is true, the turn's teacher context is inserted into the prompt (P_k⁺ of the TRIAL paper, Eq. 3). Turns have
    none if the config sets only a teacher model, which then gets the same prompt as the policy.
    """
    prompt, context = turn.prompt_ids, turn.teacher_context
    if hindsight and context is not None:
        prompt = augment(prompt, context.insert_at, context.ids)
    return ScoredSequence(np.concatenate((prompt, turn.response_ids)), len(turn.response_ids), turn.temperature)


def required(values: Tensor | None) -> Tensor:
    """Return an optional field of :class:`TurnRows` or :class:`TokenBatch` that a method requires.

    Raises:
        MethodError: the field is ``None``.
    """
    if values is None:
        raise MethodError(
            "A method reads a field of its rows that is None, expected a tensor: hindsight_logprobs needs a teacher, "
            "action_mask needs the method's needs_action_spans, and the method's prepare() sets weights."
        )
    return values


def group_turn_rows(groups: Sequence[TrajectoryGroup], config: RunSettings) -> TurnRows:
    """Return the turns of all completed rollouts, group by group, each with its advantage by the config's method.

    Raises:
        TrainingDivergedError: a reward is not finite.
    """
    completed = [trajectory for group in groups for trajectory in group.completed]
    advantages: Tensor = config.method_class(config).advantages(groups)
    turns = [turn for trajectory in completed for turn in trajectory.turns]
    rows = TurnRows(turns, trajectory_ids_of(completed), advantages)
    if config.mask_truncated:
        whole = torch.tensor([turn.finish_reason != "length" for turn in rows.turns], dtype=torch.bool)
        rows.mask = whole[rows.turn_ids]
    if config.advantage_norm == "batch_norm":
        rows.advantages = batch_standardised(advantages, torch.from_numpy(rows.num_eligible()))
    return rows

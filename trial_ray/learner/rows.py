"""Turn rows of an update: advantages, values of steps, and spans of actions."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trial_ray.environments.templates import PromptStyle
from trial_ray.errors import MethodError
from trial_ray.learner.packing import Row
from trial_ray.objectives.advantages import discounted_returns, group_means
from trial_ray.rollout.hindsight import Evidence
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class TurnRows:
    """K turns of one update, in task order, T response tokens laid end to end; the connector pieces fill the fields.

    Attributes:
        turns: the K turns; with several learners, those that this one neither scores nor trains are :class:`TurnHeader` objects.
        trajectory_ids: int64 ``[K]``, index of each turn's trajectory.
        advantages: float ``[K]``, group-relative advantage of the turn's trajectory, less the penalty for a response without
            the required form, with ``reward="per_turn"`` plus the turn's own.
        evidence: of the K turns; empty where no hindsight view is used.
        logprobs: float ``[T]``, log π_old(y|h) as the learner scores it; empty before.
        hindsight_logprobs: float ``[T]``, log π_T(y|h⁺), or ``None``.
        reference_logprobs: float ``[T]`` under the frozen initial policy, or ``None``.
        importance_weights: float ``[T]``, weights for the engine's policy (``importance_mode``), or ``None`` for weights of 1.
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
        return torch.tensor([turn.num_response_tokens for turn in self.turns], dtype=torch.int64)

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

    @property
    def num_turns(self) -> int:
        """K."""
        return len(self.trajectory_ids)

    @classmethod
    def from_rows(cls, table: TurnRows, rows: Sequence[int] | np.ndarray, device: torch.device | str) -> TokenBatch:
        """The tokens of some rows on ``device``; floats in the dtype of the log-probabilities."""
        positions = table.token_positions(rows)
        index = torch.as_tensor(np.asarray(rows, np.int64))
        dtype = table.logprobs.dtype

        def turns(values: torch.Tensor) -> torch.Tensor:
            return torch.repeat_interleave(values[index].to(dtype), table.lengths[index]).to(device)

        optional = ("hindsight_logprobs", "reference_logprobs", "importance_weights", "action_mask")
        given = {name: values for name in optional if (values := getattr(table, name)) is not None}
        return cls(
            old_logprobs=table.logprobs[positions].to(device),
            advantages=turns(table.advantages),
            mask=table.mask[positions].to(device),
            turn_ids=torch.repeat_interleave(torch.arange(len(index)), table.lengths[index]).to(device),
            trajectory_ids=table.trajectory_ids[index].to(device),
            weights=None if table.weights is None else turns(table.weights),
            **{name: values[positions].to(device) for name, values in given.items()},
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


VALUE_DISCOUNT = 0.95
"""γ of :func:`step_values`, as GiGPO chooses it."""


def anchor_ids(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Number of each turn's anchor observation, int64 ``[K]``, over the turns of all survivors in order.

    Turns share a number where their task group and their raw observation are the same.
    """
    return _numbered((group, turn.observation_digest) for group, _, turn in _placed_turns(groups))


def turn_index_ids(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """As :func:`anchor_ids`; turns share a number where their task group and their index in the rollout are the same."""
    return _numbered((group, index) for group, index, _ in _placed_turns(groups))


def _placed_turns(groups: Iterable[TrajectoryGroup]) -> Iterator[tuple[int, int, Turn]]:
    """Every survivor's turns, each with the number of its group and its index in the rollout."""
    for number, group in enumerate(groups):
        for trajectory in group.survivors:
            for index, turn in enumerate(trajectory.turns):
                yield number, index, turn


def _numbered(keys: Iterable[Hashable]) -> torch.Tensor:
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def step_returns(groups: Iterable[TrajectoryGroup], reward: str, discount: float) -> torch.Tensor:
    """Discounted return from each turn of all survivors on, float64 ``[K]``, in units of the unscaled reward.

    Args:
        groups: the groups of an update.
        reward: as ``GRPOConfig.training``; success and score arrive with the last turn, ``"per_turn"`` is the environment's.
        discount: γ.
    """
    trajectories = [trajectory for group in groups for trajectory in group.survivors]
    rewards = torch.tensor([value for each in trajectories for value in _rewards(each, reward)], dtype=torch.float64)
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories])
    return discounted_returns(rewards, torch.repeat_interleave(torch.arange(len(trajectories)), lengths), discount)


def step_values(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Mean discounted success from each turn's observation on, float64 ``[K]`` in [0, 1], as GiGPO estimates it."""
    groups = list(groups)
    return group_means(step_returns(groups, "success", VALUE_DISCOUNT), anchor_ids(groups))


def _rewards(trajectory: Trajectory, reward: str) -> list[float]:
    if reward in ("return", "per_turn"):
        return [turn.reward for turn in trajectory.turns]
    return [0.0] * (len(trajectory.turns) - 1) + [trajectory.outcome_reward(reward)]


# As the projection finds them: in any case, of ASCII letters.
_OPEN, _CLOSE = (re.compile(tag, re.IGNORECASE | re.ASCII) for tag in ("<action>", "</action>"))


def action_mask(responses: Sequence[np.ndarray], tokenizer: Any, style: PromptStyle = "tagged") -> torch.Tensor:
    """Mask of the action's tokens in responses laid end to end, bool ``[T]``.

    In a tagged response (those of a conversation are tagged, too) a token counts when any of its characters lies between the
    first ``<action>`` and the first ``</action>``, from where the projection reads the action; without that pair of tags none
    does. A plain response is the action, but for its special tokens.

    Args:
        responses: int ``[y]`` each.
        tokenizer: the policy's tokenizer.
        style: of the prompts, from which the form of the responses follows.
    """
    if style == "plain":
        masks = [~np.isin(ids, tokenizer.all_special_ids) for ids in responses]
    else:
        masks = [_between_tags(ids, tokenizer) for ids in responses]
    return torch.from_numpy(np.concatenate([np.empty(0, bool), *masks]))


def _between_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    text = _decode(ids, tokenizer)
    opening, closing = _OPEN.search(text), _CLOSE.search(text)
    if opening and closing and opening.end() < closing.start():
        first = _tokens_within(ids, opening.end(), tokenizer)
        # The action's last character may share its token with the closing tag, or take several tokens.
        shared = _tokens_within(ids, closing.start() - 1, tokenizer) + 1
        mask[first : max(shared, _tokens_within(ids, closing.start(), tokenizer))] = True
    return mask


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """How many leading tokens spell at most ``characters`` characters: the index of the token that spells the next."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_decode(ids[:middle], tokenizer)) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(ids: np.ndarray, tokenizer: Any) -> str:
    # Cleaning up would move blanks, and with them the positions of characters.
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text

"""Turn rows of an update: advantages, returns of steps, and spans of actions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trial_envs.core.projection import ACTION_CLOSE, ACTION_OPEN
from trial_ray.adapters.templates import PromptStyle
from trial_ray.config.run import RunSettings
from trial_ray.config.training import Reward, reward_name
from trial_ray.errors import MethodError, TrainingDivergedError
from trial_ray.models.prefix_tree import ScoredSequence
from trial_ray.models.vocabulary import special_token_ids
from trial_ray.objectives.advantages import (
    discounted_returns,
    group_relative_advantages,
    penalised_advantages,
)
from trial_ray.objectives.segments import segment_sum
from trial_ray.prompts.teacher_context import Evidence, augment
from trial_ray.prompts.tool_calls import last_call, require_response_template
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

_NO_TOKENS = np.empty(0, np.int32)


@dataclass
class TurnRows:
    """K turns of one update in task order, with their T response tokens concatenated; scoring fills the fields.

    Attributes:
        turns: the K turns.
        trajectory_ids: int64 ``[K]``, index of each turn's trajectory.
        advantages: float ``[K]``, advantage of each turn by the method, see ``Method.advantages``.
        evidence: teacher context of each of the K turns; empty if none is used.
        logprobs: float ``[T]``, log π_old(y|h) as scored by the learner; empty before scoring.
        hindsight_logprobs: float ``[T]``, log π_T(y|h⁺), or ``None``.
        reference_logprobs: float ``[T]`` under the frozen initial policy, or ``None``.
        importance_weights: float ``[T]``, weights for the engine's policy (``importance_mode``), or ``None`` for weights of 1.
        scores: float ``[K]``, turn scores s_k (Eq. 5), which are recorded, or ``None``.
        weights: float ``[K]``, turn weights w_k (Eq. 6), or ``None``.
        action_mask: bool ``[T]``, tokens of the action, or ``None``.
        mask: bool ``[T]``, the tokens to learn from; all generated tokens, unless the method or ``mask_truncated`` excludes some.
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
        """Number of response tokens of each turn, int64 ``[K]``."""
        return torch.tensor([len(turn.response_ids) for turn in self.turns], dtype=torch.int64)

    @cached_property
    def turn_ids(self) -> torch.Tensor:
        """Index of the turn of each token, int64 ``[T]``."""
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

    def eligible(self) -> NDArray[np.bool_]:
        """Return whether each turn has a token to learn from, bool ``[K]``."""
        eligible: NDArray[np.bool_] = (segment_sum(self.mask.long(), self.turn_ids, len(self)) > 0).numpy()
        return eligible

    def sequences(self, rows: Iterable[int], hindsight: bool = False) -> list[ScoredSequence]:
        """Return some turns as model inputs with scored responses, with or without the teacher context."""
        return [scored_turn(self.turns[row], self.evidence[row] if hindsight else None) for row in rows]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The concatenated T tokens of K turns (a microbatch or a part of it), the input of the objective's functions.

    Attributes:
        old_logprobs, advantages: float ``[T]``.
        mask: bool ``[T]``, the tokens to learn from.
        turn_ids: int64 ``[T]`` in ``[0, K)``, the turn of each token.
        trajectory_ids: int64 ``[K]``, the trajectory of each turn, the same numbers in every microbatch of an update.
        hindsight_logprobs, reference_logprobs, weights: float ``[T]``, or ``None`` if the method does not use them.
        importance_weights: float ``[T]``, weights of the tokens in the surrogate, or ``None`` for weights of 1.
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
        """K, the number of turns."""
        return len(self.trajectory_ids)

    @classmethod
    def from_rows(cls, table: TurnRows, rows: Sequence[int] | np.ndarray, device: torch.device | str) -> TokenBatch:
        """Return the tokens of some rows on ``device``; floats have the dtype of the log-probabilities."""
        positions, index = table.token_positions(rows), torch.as_tensor(np.asarray(rows, np.int64))
        lengths, dtype = table.lengths[index], table.logprobs.dtype

        def of_tokens(values: torch.Tensor | None) -> Any:
            return None if values is None else values[positions].to(device)

        def of_turns(values: torch.Tensor | None) -> Any:
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
            action_mask=of_tokens(table.action_mask),
        )


def scored_turn(turn: Turn, evidence: Evidence | None = None) -> ScoredSequence:
    """Return the sequence that scores a turn's response after its prompt P_k, or with the evidence after P_k⁺ (Eq. 3)."""
    prompt = turn.prompt_ids if evidence is None else augment(turn.prompt_ids, evidence.insert_at, evidence.ids)
    return ScoredSequence(np.concatenate((prompt, turn.response_ids)), len(turn.response_ids))


def required(values: torch.Tensor | None) -> torch.Tensor:
    """Return an optional field of :class:`TurnRows` or :class:`TokenBatch` that a method requires.

    Raises:
        MethodError: it is ``None``.
    """
    if values is None:
        raise MethodError(
            "A method reads a field of its rows that is None, expected a tensor: hindsight_logprobs needs a teacher_context, "
            "action_mask needs the method's needs_action_spans, and the method's prepare() sets weights."
        )
    return values


def group_turn_rows(groups: Sequence[TrajectoryGroup], config: RunSettings) -> TurnRows:
    """Return the turns of all completed rollouts in task order, each with its advantage by the config's method.

    Raises:
        TrainingDivergedError: a reward is not finite.
    """
    survivors = [trajectory for group in groups for trajectory in group.survivors]
    advantages: torch.Tensor = config.method_class(config).advantages(groups)
    turns = [turn for trajectory in survivors for turn in trajectory.turns]
    rows = TurnRows(turns, _trajectory_ids(survivors), advantages)
    if config.mask_truncated:
        whole = torch.tensor([turn.finish_reason != "length" for turn in rows.turns], dtype=torch.bool)
        rows.mask = whole[rows.turn_ids]
    return rows


def _trajectory_ids(trajectories: Sequence[Trajectory]) -> torch.Tensor:
    """Index of the trajectory of each turn, int64 ``[K]``."""
    lengths = torch.tensor([len(trajectory.turns) for trajectory in trajectories], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(trajectories)), lengths)


def group_advantages(groups: Sequence[TrajectoryGroup], config: RunSettings) -> torch.Tensor:
    """Advantage of each turn of all completed rollouts, float64 ``[K]``: Eq. 1, the turn's penalty, and with ``"per_turn"`` its
    own advantage.

    Raises:
        TrainingDivergedError: a reward is not finite.
    """
    survivors = [(index, trajectory) for index, group in enumerate(groups) for trajectory in group.survivors]
    trajectory_ids = _trajectory_ids([trajectory for _, trajectory in survivors])
    group_ids = torch.tensor([index for index, _ in survivors], dtype=torch.int64)
    rewards = [config.reward_scale * trajectory.outcome_reward(config.reward) for _, trajectory in survivors]
    returns = torch.tensor(rewards, dtype=torch.float64)
    if not bool(returns.isfinite().all()):
        task_id, reward = next(
            (trajectory.task_id, reward)
            for (_, trajectory), reward in zip(survivors, rewards, strict=True)
            if not math.isfinite(reward)
        )
        raise TrainingDivergedError(
            f"A rollout of task {task_id!r} earned {reward} ({reward_name(config.reward)} times "
            f"reward_scale={config.reward_scale:g}), expected a finite number; nothing was trained. "
            "Check the rewards of the environment, or lower reward_scale."
        )
    penalties = form_penalties([turn for _, trajectory in survivors for turn in trajectory.turns], config)
    if config.advantage_statistics == "rows":
        advantages = normalised_returns(returns[trajectory_ids] - penalties, group_ids[trajectory_ids], config)
    else:
        by_deviation = config.advantage_norm == "mean_std_norm"
        advantages = penalised_advantages(
            returns, group_ids, penalties, trajectory_ids, config.advantage_epsilon, by_deviation=by_deviation
        )
    if config.reward == "per_turn":
        advantages = advantages + config.turn_coeff * turn_advantages(groups, config)
    return advantages


def turn_advantages(groups: Sequence[TrajectoryGroup], config: RunSettings) -> torch.Tensor:
    """Advantage of each turn's discounted return relative to the same turn of its group's rollouts, float64 ``[K]``.

    A_k = (G_k − mean) / (deviation + ε) with G_k = r_k + γ G_{k+1}; turn k is compared with turn k of all rollouts of the group
    that have a turn k. All rollouts of a group start in the same state.

    Raises:
        TrainingDivergedError: a return is not finite.
    """
    returns = config.reward_scale * step_returns(groups, config.reward, config.turn_discount)
    if not bool(returns.isfinite().all()):
        raise TrainingDivergedError(
            f"Rewards of turns, added up and times reward_scale={config.reward_scale:g}, are not finite; nothing was trained. "
            "Check the rewards of the environment, or lower reward_scale."
        )
    return normalised_returns(returns, turn_index_ids(groups), config)


def form_penalties(turns: Sequence[Turn], config: RunSettings) -> torch.Tensor:
    """Return the penalty of each turn, float64 ``[K]`` in units of the scaled reward; 0 if the response has the required form."""
    penalties = [0.0 if turn.valid else config.invalid_action_penalty for turn in turns]
    return torch.tensor(penalties, dtype=torch.float64)


def normalised_returns(returns: torch.Tensor, group_ids: torch.Tensor, config: RunSettings) -> torch.Tensor:
    """Convert returns ``[N]`` to advantages relative to their group, by the config's ``advantage_norm``."""
    by_deviation = config.advantage_norm == "mean_std_norm"
    return group_relative_advantages(returns, group_ids, config.advantage_epsilon, by_deviation=by_deviation)


def anchor_ids(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Id of each turn's anchor observation, int64 ``[K]``, over the turns of all completed rollouts in order.

    Turns have the same id if their task group and their raw observation are the same.
    """
    return _number((group, turn.observation) for group, _, turn in _placed_turns(groups))


def turn_index_ids(groups: Iterable[TrajectoryGroup]) -> torch.Tensor:
    """Id of each turn's group and index in its rollout, int64 ``[K]``, over the turns of all completed rollouts in order."""
    return _number((group, index) for group, index, _ in _placed_turns(groups))


def _placed_turns(groups: Iterable[TrajectoryGroup]) -> Iterator[tuple[int, int, Turn]]:
    """Turns of every completed rollout, each with the index of its group and its index in the rollout."""
    for number, group in enumerate(groups):
        for trajectory in group.survivors:
            for index, turn in enumerate(trajectory.turns):
                yield number, index, turn


def _number(keys: Iterable[Hashable]) -> torch.Tensor:
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def step_returns(groups: Iterable[TrajectoryGroup], reward: Reward, discount: float) -> torch.Tensor:
    """Discounted return from each turn of all completed rollouts to the end, float64 ``[K]``, in units of the unscaled reward.

    Args:
        groups: the groups of an update.
        reward: as in ``GRPOConfig.training``; success, score and the reward of a function arrive with the last turn,
            ``"per_turn"`` uses the environment's rewards.
        discount: γ.
    """
    trajectories = [trajectory for group in groups for trajectory in group.survivors]
    rewards = [value for trajectory in trajectories for value in _rewards(trajectory, reward)]
    return discounted_returns(torch.tensor(rewards, dtype=torch.float64), _trajectory_ids(trajectories), discount)


def _rewards(trajectory: Trajectory, reward: Reward) -> list[float]:
    if reward in ("return", "per_turn"):
        return [turn.reward for turn in trajectory.turns]
    return [0.0] * (len(trajectory.turns) - 1) + [trajectory.outcome_reward(reward)]


def action_mask(responses: Sequence[np.ndarray], tokenizer: Any, style: PromptStyle = "tagged") -> torch.Tensor:
    """Return the mask of the action's tokens in concatenated responses, bool ``[T]``.

    In a tagged response (also in a conversation), a token counts if any of its characters is between the first ``<action>`` and
    the first ``</action>``, from which the projection reads the action; without this pair of tags, no token counts. In a plain
    response, all tokens count except special tokens. In a response that calls tools, the tokens of the last call count, see
    :func:`~trial_ray.prompts.tool_calls.last_call`.

    Args:
        responses: int ``[y]`` each.
        tokenizer: the policy's tokenizer.
        style: style of the prompts, which determines the form of the responses.
    """
    if style == "plain":
        special = list(special_token_ids(tokenizer))
        masks = [~np.isin(ids, special) for ids in responses]
    elif style == "tools":
        require_response_template(tokenizer)
        masks = [last_call(tokenizer, ids) for ids in responses]
    else:
        masks = [_between_tags(ids, tokenizer) for ids in responses]
    return torch.from_numpy(np.concatenate([np.empty(0, bool), *masks]))


def _between_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    mask = np.zeros(len(ids), bool)
    text = _decode(ids, tokenizer)
    opening, closing = ACTION_OPEN.search(text), ACTION_CLOSE.search(text)
    if opening and closing and opening.end() < closing.start():
        first = _tokens_within(ids, opening.end(), tokenizer)
        # The action's last character may share its token with the closing tag, or consist of several tokens.
        shared = _tokens_within(ids, closing.start() - 1, tokenizer) + 1
        mask[first : max(shared, _tokens_within(ids, closing.start(), tokenizer))] = True
    return mask


def _tokens_within(ids: np.ndarray, characters: int, tokenizer: Any) -> int:
    """Return the number of leading tokens that spell at most ``characters`` characters, by bisection."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_decode(ids[:middle], tokenizer)) <= characters:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(ids: np.ndarray, tokenizer: Any) -> str:
    # Cleaning up would remove blanks, which changes the positions of characters.
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text

"""The learner's connector piece: from groups of trajectories to the finished turn rows of an update."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from trial_ray.errors import ConfigError, MethodError, PolicyBrokenError, TrainingDivergedError, WeightSyncError
from trial_ray.learner.exchange import LearnerExchange
from trial_ray.learner.method import Method
from trial_ray.learner.packing import Row, score_views
from trial_ray.learner.rows import TurnRows, action_mask, step_returns, turn_index_ids
from trial_ray.learner.update_plan import UpdatePlan, plan_update
from trial_ray.metrics import EFFECTIVE_SAMPLE_SIZE, LEARNER, log
from trial_ray.models.module import CausalLMModule
from trial_ray.models.prefix_tree import ScoredSequence
from trial_ray.objectives.advantages import group_relative_advantages, penalised_advantages
from trial_ray.objectives.divergences import engine_divergences
from trial_ray.objectives.importance import effective_sample_size, importance_weights
from trial_ray.rollout.hindsight import Evidence, TurnContext, encode_evidence, privileged_view
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trial_ray.config.run import RunSettings

TURN_ROWS, UPDATE_PLAN = "turn_rows", "update_plan"
"""Keys in ``shared_data`` under which :class:`UpdateRows` hands on the rows and the plan."""

_NOT_NEEDED = Evidence(np.empty(0, np.int32), 0)
_BEHAVIOUR = "behaviour_logprobs"


class UpdateRows(ConnectorV2):
    """RLlib's connector piece of the learner: groups of trajectories become the finished turn rows of an update.

    Args:
        config: of the run.
        method: fixes its profile or advantages on the scored rows.
        exchange: the other learners.
    """

    def __init__(self, config: RunSettings, method: Method[Any], exchange: LearnerExchange) -> None:
        super().__init__()
        self.config = config
        self.method = method
        self.scoring = Scoring(config, exchange)
        self.iteration = 0
        """Iteration of the update, counted from 1."""
        self.weight_version: int | None = None
        """Version of the weights before the update."""
        self.plan: UpdatePlan | None = None
        """Plan of the update where it was made before; ``None``: it is made here."""

    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[TrajectoryGroup],
        shared_data: dict[str, Any],
        metrics: MetricsLogger,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Put :class:`TurnRows` and their :class:`UpdatePlan` into ``shared_data``.

        Raises:
            TrainingDivergedError, PolicyBrokenError, WeightSyncError, MethodError: the rows cannot be trained on.
        """
        module: CausalLMModule = rl_module[DEFAULT_MODULE_ID].unwrapped()
        rows = group_turn_rows(episodes, self.config)
        plan = self.plan or plan_rows(episodes, self.config, self.iteration)
        rank = self.scoring.exchange.rank
        if self.config.privileged_view is not None:
            # The training forward of some methods scores second views too.
            needed = plan.share(rank) if self.method.divergence else plan.scoring[rank]
            trajectories = [trajectory for group in episodes for trajectory in group.survivors]
            peers: Sequence[tuple[str, ...]] = ()
            if self.config.privileged_view == "peer":
                peers = [group.peer_actions(trajectory) for group in episodes for trajectory in group.survivors]
            rows.evidence = encode_views(trajectories, self.config, module.tokenizer, set(needed.tolist()), peers)
        self.scoring.score(rows, plan, module, metrics, self.weight_version)
        if self.method.needs_action_spans:
            rows.action_mask = self._action_mask(rows, plan.scoring[rank], module.tokenizer)
        prepare_rows(rows, episodes, self.method, metrics, self.iteration)
        shared_data |= {TURN_ROWS: rows, UPDATE_PLAN: plan}
        return batch

    def _action_mask(self, rows: TurnRows, share: np.ndarray, tokenizer: Any) -> torch.Tensor:
        """The mask of all rows, of which each learner finds those that it scores."""
        own = action_mask([rows.turns[row].response_ids for row in share], tokenizer, self.config.prompt_style)
        whole = torch.zeros(int(rows.lengths.sum()), dtype=torch.uint8)
        whole[rows.token_positions(share)] = own.to(torch.uint8)
        self.scoring.exchange.add_up([whole])
        return whole.bool()


def group_turn_rows(groups: list[TrajectoryGroup], config: RunSettings) -> TurnRows:
    """The turns of all completed rollouts end to end, in task order, each with its advantage (Eq. 1, and what is its own).

    Raises:
        TrainingDivergedError: a reward is not finite.
    """
    survivors = [(index, trajectory) for index, group in enumerate(groups) for trajectory in group.survivors]
    turns = [turn for _, trajectory in survivors for turn in trajectory.turns]
    turns_per_trajectory = torch.tensor([len(trajectory.turns) for _, trajectory in survivors], dtype=torch.int64)
    trajectory_ids = torch.repeat_interleave(torch.arange(len(survivors)), turns_per_trajectory)
    group_ids = torch.tensor([index for index, _ in survivors], dtype=torch.int64)
    rewards = [config.reward_scale * trajectory.outcome_reward(config.reward) for _, trajectory in survivors]
    returns = torch.tensor(rewards, dtype=torch.float64)
    if not bool(returns.isfinite().all()):
        task_id, reward = next(
            (each.task_id, earned)
            for (_, each), earned in zip(survivors, rewards, strict=True)
            if not math.isfinite(earned)
        )
        raise TrainingDivergedError(
            f"A rollout of task {task_id!r} earned {reward} ({config.reward} times reward_scale={config.reward_scale:g}), expected "
            "a finite number; nothing was trained. Check the rewards of the environment, or lower reward_scale."
        )
    penalties = form_penalties(turns, config)
    if config.advantage_statistics == "rows":
        advantages = normalised_returns(returns[trajectory_ids] - penalties, group_ids[trajectory_ids], config)
    else:
        by_deviation = config.advantage_norm == "mean_std_norm"
        advantages = penalised_advantages(
            returns, group_ids, penalties, trajectory_ids, config.advantage_epsilon, by_deviation=by_deviation
        )
    if config.reward == "per_turn":
        advantages = advantages + config.turn_coeff * turn_advantages(groups, config)
    return TurnRows(turns, trajectory_ids, advantages)


def turn_advantages(groups: list[TrajectoryGroup], config: RunSettings) -> torch.Tensor:
    """Advantage of each turn's discounted return over those of the same turn of its group's rollouts, float64 ``[K]``.

    A_k = (G_k − mean) / (deviation + ε) with G_k = r_k + γ G_{k+1}, where turn k is compared with turn k of the rollouts that
    took as many; all of them began in the same state.

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
    """Penalty of each turn whose response lacks the required form, float64 ``[K]`` in units of the scaled reward."""
    charges = [0.0 if turn.valid else config.invalid_action_penalty for turn in turns]
    return torch.tensor(charges, dtype=torch.float64)


def normalised_returns(returns: torch.Tensor, group_ids: torch.Tensor, config: RunSettings) -> torch.Tensor:
    """Returns ``[N]`` as advantages over those of their group, by the config's ``advantage_norm``."""
    by_deviation = config.advantage_norm == "mean_std_norm"
    return group_relative_advantages(returns, group_ids, config.advantage_epsilon, by_deviation=by_deviation)


def plan_rows(groups: Sequence[TrajectoryGroup], config: RunSettings, iteration: int) -> UpdatePlan:
    """The plan of the update from the lengths of all rows; every learner makes the same plan."""
    trajectories = [trajectory for group in groups for trajectory in group.survivors]
    return plan_update(
        [[turn.num_tokens for turn in each.turns] for each in trajectories],
        minibatch_rows=config.minibatch_rows,
        microbatch_rows=config.microbatch_rows,
        num_learners=max(1, config.num_learners),
        batch_shards=config.batch_shards,
        num_epochs=config.num_epochs,
        shuffle_seed=(config.seed or 0, iteration) if config.shuffle else None,
        weighting=config.microbatch_weighting,
    )


def encode_views(
    trajectories: Sequence[Trajectory],
    config: RunSettings,
    tokenizer: Any,
    rows: Collection[int] | None = None,
    peers: Sequence[tuple[str, ...]] = (),
) -> list[Evidence]:
    """The hindsight context of every turn, all trajectories' turns in order.

    Args:
        trajectories: whose turns.
        config: names the view and its limit.
        tokenizer: the policy's.
        rows: numbers of the turns that are wanted, counted over all trajectories; the others get no ids. ``None``: all.
        peers: what the view ``"peer"`` shows in each trajectory (see ``TrajectoryGroup.peer_actions``); empty: nothing.

    Raises:
        ConfigError: the config names no view, or the environment cannot give it.
    """
    if (view := config.privileged_view) is None:
        raise ConfigError("privileged_view is None, expected a view: without one turns have no evidence to encode.")
    adapters = {name: config.adapter_of(name) for name in {trajectory.environment for trajectory in trajectories}}
    shown_peers = peers or [()] * len(trajectories)
    numbered = enumerate(
        (trajectory, peer, index)
        for trajectory, peer in zip(trajectories, shown_peers, strict=True)
        for index in range(len(trajectory.turns))
    )

    def evidence(trajectory: Trajectory, peer: tuple[str, ...], index: int) -> Evidence:
        turn, adapter = trajectory.turns[index], adapters[trajectory.environment]
        context = TurnContext(
            environment=adapter.env_id,
            family=trajectory.family,
            outcome=turn.outcome,
            terminal=trajectory.ended == "terminated" and index == len(trajectory.turns) - 1,
            success=trajectory.success,
            solution=trajectory.solution,
            skills=adapter.skills or {},
            peer=peer,
        )
        shown = privileged_view(view, context)
        ids = encode_evidence(shown, tokenizer, config.max_outcome_tokens)
        return Evidence(ids, 0 if shown.frame.in_front else turn.insert_at)

    return [evidence(*turn) if rows is None or row in rows else _NOT_NEEDED for row, turn in numbered]


class Scoring:
    """Scores every response under the policy before the update: both views by the same weights, kernel and precision.

    With a stale teacher, the teacher scores the privileged view instead. Each learner scores its share of the
    trajectories, then all have the scores of all.

    The learner's numbers, not the engine's, are the old log-probabilities. How far the engine's are from them is logged.
    Responses of the version that is updated must agree: where they differ by more than ``max_logprob_gap``, nothing is
    trained, because the engine then sampled from another policy. With an ``importance_cap``, each token gets the weight
    that corrects for the difference.

    Args:
        config: says what is scored.
        exchange: the other learners.
    """

    def __init__(self, config: RunSettings, exchange: LearnerExchange) -> None:
        self.config = config
        self.exchange = exchange

    def score(
        self, rows: TurnRows, plan: UpdatePlan, module: CausalLMModule, metrics: MetricsLogger, version: int | None
    ) -> None:
        """Fill the log-probabilities of the rows.

        Args:
            rows: with evidence, where the config names a privileged view.
            plan: says which rows this learner scores.
            module: the policy.
            metrics: takes the differences from the engine.
            version: of the weights that are updated; ``None``: the newest one that sampled a row.

        Raises:
            PolicyBrokenError: the learner's weights give log-probabilities that are not finite.
            WeightSyncError: engine and learner disagree on the sampled tokens.
        """
        share = plan.scoring[self.exchange.rank]
        with module.autocast():
            scores = self._score(module, rows.model_rows(share, with_evidence=bool(rows.evidence)), metrics)
        module.finish_passes()
        sampled = [rows.turns[row].logprobs for row in share]
        own = {**scores, _BEHAVIOUR: torch.from_numpy(np.concatenate([np.empty(0, np.float32), *sampled]))}
        found = self._exchanged(rows, share, own, module.lm.dtype)
        behaviour = found.pop(_BEHAVIOUR)
        for name, values in found.items():
            _require_finite_scores(name, values)
            setattr(rows, name, values)
        self._compare_with_engine(rows, behaviour, metrics, version)
        size = effective_sample_size(rows.logprobs, behaviour)
        log(metrics, EFFECTIVE_SAMPLE_SIZE, size.item())
        if (cap := self.config.importance_cap) is not None:
            rows.importance_weights = importance_weights(
                rows.logprobs, behaviour, rows.turn_ids, len(rows), cap, self.config.importance_mode
            )
            bounded = (rows.importance_weights >= cap) | (rows.importance_weights == 0)
            log(metrics, f"{LEARNER}engine/bounded_fraction", bounded.double().mean().item())

    def _score(self, module: CausalLMModule, rows: Sequence[Row], metrics: MetricsLogger) -> dict[str, torch.Tensor]:
        """Flat log-probabilities of the share's response tokens by the name of their field in :class:`TurnRows`."""
        own: dict[str, list[ScoredSequence]] = {"logprobs": [row.sequence for row in rows]}
        lagged: dict[str, list[ScoredSequence]] = {}
        if self.config.privileged_view is not None:
            # Of the same model, both views form one tree.
            asked = own if module.teacher is None else lagged
            asked["hindsight_logprobs"] = [row.hindsight_row.sequence for row in rows]
        scores = self._score_sequences(module.lm, own, metrics)
        if module.teacher is not None:
            scores |= self._score_sequences(module.teacher, lagged, metrics)
        with module.reference_model() as reference:
            if reference is not None:
                scores |= self._score_sequences(reference, {"reference_logprobs": own["logprobs"]}, metrics)
        return scores

    def _score_sequences(
        self, lm: PreTrainedModel, views: dict[str, list[ScoredSequence]], metrics: MetricsLogger
    ) -> dict[str, torch.Tensor]:
        config = self.config
        scores, packed = score_views(
            lm, views, max_tokens=config.max_tokens_per_forward, temperature=config.temperature
        )
        if packed is not None:
            log(metrics, f"{LEARNER}scoring/tokens_forwarded", packed.num_tokens)
            log(metrics, f"{LEARNER}scoring/tokens_distinct", packed.num_distinct)
        return scores

    def _exchanged(
        self, rows: TurnRows, share: np.ndarray, scores: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """All learners' scores, each ``[T]`` on the CPU; every token was scored by one of them."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        positions = rows.token_positions(share)
        whole = {name: torch.zeros(int(rows.lengths.sum()), dtype=wide) for name in scores}
        for name, values in scores.items():
            whole[name][positions] = values.to("cpu", wide)
        self.exchange.add_up(list(whole.values()))
        return whole

    def _compare_with_engine(
        self, rows: TurnRows, behaviour: torch.Tensor, metrics: MetricsLogger, version: int | None
    ) -> None:
        """Log how far the engine's log-probabilities are from the learner's; refuse to train where they are another's."""
        staleness = _staleness(rows, version)
        # Older responses differ because the weights have changed since, which is no error.
        found = engine_divergences(rows.logprobs, behaviour, compared=(staleness <= 0)[rows.turn_ids])
        logged = {f"engine/{name}": value for name, value in found.items()}
        logged |= {"rows/staleness_mean": staleness.double().mean(), "rows/staleness_max": staleness.max()}
        for name, value in logged.items():
            log(metrics, f"{LEARNER}{name}", value.item())
        gap = math.nan if found["kl"].isnan() else found["logprob_gap"].item()
        limit = self.config.logprob_gap_limit()
        if not gap <= limit:  # NaN too
            raise WeightSyncError(
                f"Engine and learner disagree by {gap:.3g} nats a token on average (expected at most {limit:g}, "
                "max_logprob_gap): the engine sampled from another policy than the one that is trained, so nothing was "
                "trained on its responses. Check that both use the same dtype and temperature, and that the engine supports "
                "reloading this model's weights."
            )


def _staleness(rows: TurnRows, version: int | None) -> torch.Tensor:
    """By how many versions the weights that sampled each turn are older than those that are updated, int64 ``[K]``."""
    sampled_by = torch.tensor([turn.weight_version for turn in rows.turns], dtype=torch.int64)
    return (int(sampled_by.max()) if version is None else version) - sampled_by


def prepare_rows(
    rows: TurnRows,
    groups: list[TrajectoryGroup],
    method: Method[Any],
    metrics: MetricsLogger,
    iteration: int,
) -> None:
    """Let the method look at both views' scores; its profile or advantages are fixed during the update.

    Raises:
        MethodError: the method gave the rows a field of the wrong shape.
        TrainingDivergedError: advantages or weights of turns are not finite.
    """
    logged = method.prepare(rows, groups, iteration)
    _require_fields(method, rows)
    _require_finite_rows(method, rows)
    for name, value in logged.items():
        log(metrics, f"{LEARNER}{method.name}/{name}", value.item())


def _require_fields(method: Method[Any], rows: TurnRows) -> None:
    """Refuse what would be taken for another turn's or token's value."""
    num_tokens = int(rows.lengths.sum())
    sizes = {"advantages": len(rows), "scores": len(rows), "weights": len(rows), "mask": num_tokens}
    for name, size in sizes.items():
        values = getattr(rows, name)
        if values is not None and values.shape != (size,):
            raise MethodError(
                f"{type(method).__name__}.prepare must leave rows.{name} with shape [{size}]; found {list(values.shape)}."
            )


def _require_finite_scores(name: str, values: torch.Tensor) -> None:
    if wrong := int((~values.isfinite()).sum()):
        raise PolicyBrokenError(
            f"{name} of {wrong} of {len(values)} sampled tokens are not finite: the policy's weights give no probabilities any "
            "more. Nothing was trained on them. Lower lr, and continue from the last checkpoint."
        )


def _require_finite_rows(method: Method[Any], rows: TurnRows) -> None:
    for name in ("advantages", "weights"):
        values = getattr(rows, name)
        if values is not None and (wrong := int((~values.isfinite()).sum())):
            raise TrainingDivergedError(
                f"{name} of {wrong} of {len(rows)} turns are not finite, so nothing was trained on them. Look at what "
                f"{type(method).__name__}.prepare does with them."
            )

"""The one table of logged metrics: name, kind and meaning.

Loggers, checks of names, charts, terminal and documentation read it; a metric that the package logs and that is not in it
fails a test. A method of a user's own may log others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

LEARNER = "learners/default_policy/"
ENV_RUNNERS = "env_runners/"
EVALUATION = "evaluation/env_runners/"

Kind = Literal["sum", "lifetime_sum", "mean", "max", "item"]
"""How RLlib reduces what is logged within an iteration. ``"item"`` is computed once: rates and means over rollouts are sums
over all of an iteration's rollouts, divided on the driver (RLlib's own merge of means would weigh env runners alike)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One logged number.

    Attributes:
        name: ``/``-joined key below the prefix of its group.
        kind: see :data:`Kind`.
        meaning: one line of Markdown.
        column: its heading and format in the terminal's line of an iteration.
    """

    name: str
    kind: Kind
    meaning: str
    column: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class MetricGroup:
    """Metrics that one part of a run logs.

    Attributes:
        name: of the group's table in the documentation.
        prefix: of the metrics' keys in a result.
        metrics: of the group.
    """

    name: str
    prefix: str
    metrics: tuple[Metric, ...]


_PANEL = MetricGroup(
    "panel",
    EVALUATION,
    (
        Metric(
            "success_rate",
            "item",
            "share of the evaluation set's episodes that were solved; failed episodes are excluded throughout",
        ),
        Metric("score_mean", "item", "mean score of these episodes"),
        Metric("episode_return_mean", "item", "mean undiscounted sum of rewards of these episodes"),
        Metric("episode_return_min", "item", "the smallest of these sums"),
        Metric("episode_return_max", "item", "the largest of these sums"),
        Metric("episode_len_mean", "item", "mean number of turns of these episodes"),
        Metric("episode_len_min", "item", "turns of the shortest of these episodes"),
        Metric("episode_len_max", "item", "turns of the longest of these episodes"),
        Metric("truncated_rate", "item", "share of these episodes that a limit on turns or prompt tokens truncated"),
        Metric("num_episodes", "item", "episodes that these figures are over"),
        Metric("num_env_steps_sampled", "item", "turns of these episodes"),
        Metric("rewards/NAME_mean", "item", "as in training"),
    ),
)
_ROLLOUTS = MetricGroup(
    "rollouts",
    ENV_RUNNERS,
    (
        Metric("success_rate", "item", "share of episodes that solved their task", column=("success", "{:.1%}")),
        Metric("score_mean", "item", "mean over episodes of the environment's score"),
        Metric(
            "episode_return_mean",
            "item",
            "mean over episodes of the undiscounted sum of rewards",
            column=("return", "{:.2f}"),
        ),
        Metric("episode_return_min", "item", "the smallest of these sums"),
        Metric("episode_return_max", "item", "the largest of these sums"),
        Metric("episode_len_mean", "item", "mean over episodes of the turns taken", column=("turns", "{:.1f}")),
        Metric("episode_len_min", "item", "turns of the shortest episode"),
        Metric("episode_len_max", "item", "turns of the longest episode"),
        Metric("truncated_rate", "item", "share of episodes truncated by a limit on turns or prompt tokens"),
        Metric("num_episodes", "sum", "episodes played to their end"),
        Metric("num_episodes_lifetime", "lifetime_sum", "the same of the run so far"),
        Metric("num_failed_episodes", "sum", "episodes that an engine or the environment failed; in no other figure"),
        Metric("num_env_steps_sampled", "sum", "turns taken"),
        Metric("num_env_steps_sampled_lifetime", "lifetime_sum", "turns taken in the run so far"),
        Metric("num_prompt_tokens", "sum", "prompt tokens over turns"),
        Metric("num_response_tokens", "sum", "response tokens over turns"),
        Metric("invalid_response_rate", "item", "share of turns whose response lacks the required form"),
        Metric(
            "invalid_action_rate",
            "item",
            "share of turns whose action the environment did not understand, where it reports so",
        ),
        Metric("cut_response_rate", "item", "share of turns whose response reached `max_response_tokens`"),
        Metric(
            "cut_history_rate",
            "item",
            "share of turns whose prompt lost history to `max_prompt_tokens`; in conversations, that restart",
        ),
        Metric("cut_observation_rate", "item", "share of turns whose prompt also lost a part of the observation"),
        Metric(
            "rewards/NAME_mean",
            "item",
            "mean over episodes of the sum of the reward that the environment calls NAME, over those that were given it",
        ),
    ),
)
_LEARNER = MetricGroup(
    "learner",
    LEARNER,
    (
        Metric(
            "grpo/surrogate_loss",
            "mean",
            r"$L_{GRPO}$, token mean of the clipped surrogate",
            column=("surrogate", "{:+.2e}"),
        ),
        Metric(
            "trial/dense_loss",
            "mean",
            r"$L_{dense}$ (Eq. 7), before coefficient and clamp; logged during warm-up too",
            column=("dense", "{:+.2e}"),
        ),
        Metric("trial/turn_score_mean", "mean", "mean over turn rows of $s_k$ (Eq. 5), nats per token"),
        Metric("trial/turn_weight_std", "mean", "standard deviation over turn rows of the applied weights $w_k$"),
        Metric(
            "trial/gap_mean",
            "mean",
            r"mean over tokens of $\Delta^{old}$; above 0 where hindsight confirms the responses on average",
        ),
        Metric(
            "trial/clamp_saturated_fraction",
            "mean",
            "share of microbatches in which the clamp of Eq. 8 removed the dense gradient; 0 during warm-up",
            column=("saturated", "{:.0%}"),
        ),
        Metric("trial/hindsight_coeff", "mean", r"$\lambda_g$"),
        Metric("grpo/entropy", "mean", "token mean of the policy's entropy, nats"),
        Metric(
            "grpo/kl",
            "mean",
            "token mean of k3 against the frozen initial policy, nats; without a reference model (`kl_coeff=0`), against "
            r"$\pi_{old}$",
            column=("kl", "{:.1e}"),
        ),
        Metric("grpo/clip_fraction", "mean", "share of tokens whose ratio is outside the clip range"),
        Metric(
            "grpo/ratio_mean",
            "mean",
            r"token mean of $r_t = \pi_\theta / \pi_{old}$ before clipping, each at most $e^{20}$",
        ),
        Metric("total_loss", "mean", "mean over optimizer steps of the minibatch's loss $L$ (Eq. 8)"),
        Metric(
            "engine/logprob_gap",
            "mean",
            r"trainer–sampler mismatch: mean of \|learner's $\log \pi_{old}$ − engine's log-probability\|, nats, "
            "over rows of the current version (0 without such rows); above `max_logprob_gap`, or with NaN in any "
            "row, nothing is trained and the run stops",
            column=("logprob gap", "{:.1e}"),
        ),
        Metric("engine/logprob_gap_max", "max", "the largest of these differences"),
        Metric(
            "engine/ratio_mean",
            "mean",
            r"mean of the importance ratio $r = \pi_{old} / \pi_{engine}$ over all tokens, each at most $e^{20}$, "
            "before the cap",
        ),
        Metric("engine/ratio_max", "max", "the largest of these ratios"),
        Metric(
            "engine/kl", "mean", r"mean of $r - 1 - \log r$, an estimate of $\mathrm{KL}(\pi_{engine} \| \pi_{old})$"
        ),
        Metric("engine/effective_sample_size", "mean", r"$(\sum r)^2 / (T \sum r^2)$, in (0, 1]"),
        Metric(
            "engine/bounded_fraction",
            "mean",
            "share of tokens whose weight was truncated to `importance_cap` or masked",
        ),
        Metric("num_module_steps_trained", "sum", "trained turn rows, counted by the learners"),
        Metric("num_module_steps_trained_lifetime", "lifetime_sum", "the same of the run so far"),
        Metric("rows/skipped", "sum", "turn rows of steps skipped for non-finite gradients"),
        Metric("skipped_updates", "sum", "these steps"),
        Metric(
            "rows/staleness_mean",
            "mean",
            "versions by which the weights that sampled a turn are older than those trained on it, mean over turn rows",
        ),
        Metric("rows/staleness_max", "max", "the largest of these ages"),
        Metric("rows/lost_groups", "sum", "groups lost with the env runner that had sampled them"),
        Metric("scoring/tokens_forwarded", "sum", "model inputs of scoring, before the first step"),
        Metric("scoring/tokens_distinct", "sum", "distinct prefixes of the scored rows"),
        Metric(
            "scoring/seconds",
            "max",
            "time of scoring (contexts, passes without gradients, the method's preparation), slowest learner",
        ),
        Metric(
            "update/tokens_forwarded",
            "sum",
            "model inputs of the passes with gradients ([scaling.md](scaling.md#shared-prefixes))",
        ),
        Metric("update/tokens_distinct", "sum", "distinct prefixes of the rows of these passes"),
        Metric("update/seconds", "max", "time of the iteration's optimizer steps, slowest learner"),
        Metric("update/tokens_trained", "sum", "prompt and response tokens of the trained rows, once an epoch"),
    ),
)
_METHODS = MetricGroup(
    "methods",
    LEARNER,
    (
        Metric("sdar/dense_loss", "mean", "−mean of the gate times log π_θ, before μ"),
        Metric("sdar/gate_mean", "mean", "mean over tokens of σ(β δ_θ); 0.5 throughout for `grpo_opsd`"),
        Metric("sdar/gap_mean", "mean", "mean over tokens of δ_θ, nats"),
        Metric("rlsd/rescaling", "mean", "λ of the iteration"),
        Metric(
            "rlsd/gap_mean", "mean", r"mean over tokens of log π_T(y\|h⁺) − log π_old(y\|h), nats, before any bound"
        ),
        Metric("serl/rescaling", "mean", "λ of the iteration"),
        Metric("serl/gap_mean", "mean", "as `rlsd/gap_mean`"),
        Metric(
            "serl/action_token_fraction",
            "mean",
            "share of rescaled tokens; 0: no response had both tags, and SERL is GRPO",
        ),
        Metric("opsd/dense_loss", "mean", "`jsd`: mean divergence, nats per token; `sampled`: −mean of δ_θ log π_θ"),
        Metric("gigpo/step_advantage_std", "mean", "standard deviation of $A_{step}$ over turn rows, before ω"),
        Metric(
            "gigpo/shared_anchor_fraction",
            "mean",
            "share of turn rows whose observation occurs more than once in their group",
        ),
        Metric("stepopsd/rescaling", "mean", "λ of the iteration"),
        Metric(
            "stepopsd/gap_mean", "mean", r"mean over tokens of log π_T(y\|h⁺) − log π_old(y\|h), nats, before any bound"
        ),
        Metric(
            "stepopsd/step_factor_std",
            "mean",
            "standard deviation of f_k over turn rows; 0 where all steps weigh alike",
        ),
        Metric(
            "agentopsd/gap_mean",
            "mean",
            r"mean over tokens of log π_T(y\|h⁺) − log π_old(y\|h), nats, before any bound",
        ),
        Metric("agentopsd/revision_mean", "mean", r"mean over turn rows of \|ΔB_k\|"),
        Metric("agentopsd/factor_std", "mean", "standard deviation of w_k over turn rows"),
    ),
)
_DRIVER = MetricGroup(
    "driver",
    "",
    (
        Metric("rows/sampled", "sum", "turn rows of all completed rollouts"),
        Metric("rows/given_to_learners", "sum", "turn rows of trained groups"),
        Metric("rows/left_out", "sum", "turn rows of dropped groups"),
        Metric(
            "rows/redrawn",
            "sum",
            "turn rows of groups played again: fewer than 2 rollouts completed, or their env runner was lost",
        ),
        Metric(
            "rows/stale",
            "sum",
            "turn rows dropped and resampled because their weights were too old, or because they were in flight "
            "when the effective sample size was too small",
        ),
        Metric("rows/in_flight", "sum", "turn rows of finished groups that wait for a later update"),
        Metric("groups/num_trained", "sum", "groups trained"),
        Metric(
            "groups/num_dropped",
            "sum",
            "groups dropped: fewer than 2 completed rollouts, or no variance with `drop_zero_variance_groups`",
        ),
        Metric(
            "groups/num_too_long",
            "sum",
            "groups dropped because the first prompt of their task exceeds `max_prompt_tokens`; a warning names "
            "each task",
        ),
        Metric("groups/num_refilled", "sum", "tasks drawn to replace groups without variance (`max_refills`)"),
        Metric("groups/num_stale", "sum", "groups whose rows `rows/stale` counts"),
        Metric(
            "groups/num_in_flight", "sum", "groups, finished or not, that wait for a later update when this one begins"
        ),
        Metric("groups/num_of_several_versions", "sum", "trained groups that several versions of the weights sampled"),
        Metric(
            "groups/num_on_policy_iterations",
            "sum",
            "1 where a small effective sample size made the iteration on-policy",
        ),
        Metric("groups/num_empty_iterations", "sum", "1 where the iteration trained nothing; a warning says why"),
        Metric(
            "groups/zero_variance_fraction",
            "item",
            "share of groups with at least 2 completed rollouts whose rollouts all earned the same `reward`, up "
            "to rounding",
        ),
        Metric("guards/num_violated", "sum", "violated [health checks](reliability.md#health-checks-of-the-policy)"),
        Metric("actors/num_engines", "item", "engines when the iteration began"),
        Metric("actors/num_env_runners", "item", "env-runner actors when the iteration began"),
        Metric("seconds/sampling", "sum", "the driver's time in this iteration for sampling"),
        Metric("seconds/update", "sum", "for the learners' update, its scoring included"),
        Metric("seconds/sync", "sum", "for sending weights"),
        Metric("seconds/evaluation", "sum", "for the evaluation sets"),
    ),
)
_RLLIB = MetricGroup(
    "rllib",
    "",
    (
        Metric("training_iteration", "lifetime_sum", "iterations so far"),
        Metric("time_total_s", "lifetime_sum", "seconds of all iterations so far"),
        Metric("time_this_iter_s", "item", "seconds of this iteration"),
        Metric("num_env_steps_sampled_lifetime", "lifetime_sum", "turns taken in the run so far"),
        Metric("num_training_step_calls_per_iteration", "sum", "1"),
        Metric("timers/training_iteration", "item", "mean seconds of an iteration without its evaluation"),
        Metric("timers/training_step", "item", "mean seconds of sampling, update and sync"),
        Metric("timers/restore_env_runners", "item", "mean seconds of connecting restarted env runners"),
        Metric("timers/evaluation_iteration", "item", "mean seconds of an evaluation"),
        Metric("fault_tolerance/num_healthy_workers", "item", "env runners that can play"),
        Metric("fault_tolerance/num_remote_worker_restarts", "item", "env runners started again so far"),
        Metric(
            "fault_tolerance/num_env_runners_dropped_lifetime", "item", "env runners replaced for being late so far"
        ),
        Metric("env_runner_group/actor_manager_num_outstanding_async_reqs", "item", "RLlib's own calls under way"),
    ),
)

GROUPS = (_PANEL, _ROLLOUTS, _LEARNER, _METHODS, _DRIVER, _RLLIB)
METRICS: Mapping[str, Metric] = {group.prefix + metric.name: metric for group in GROUPS for metric in group.metrics}
"""Every metric by its key in a flat result; of RLlib's own those by which runs are commonly stopped."""

PANEL_SUCCESS = f"{EVALUATION}success_rate"
TRAINING_SUCCESS = f"{ENV_RUNNERS}success_rate"
EFFECTIVE_SAMPLE_SIZE = f"{LEARNER}engine/effective_sample_size"
TURN_SCORE = f"{LEARNER}trial/turn_score_mean"
PROFILE_STD = f"{LEARNER}trial/turn_weight_std"

_NAMED_REWARDS = [f"{prefix}rewards/" for prefix in (ENV_RUNNERS, EVALUATION)]

_MISSING = object()
"""In place of a metric that was not logged; RLlib takes ``None`` for no default."""


def log(logger: MetricsLogger, key: str, value: float) -> None:
    """Log a number as the table says; what a method of a user's own logs beside it is a mean.

    Args:
        logger: the driver's, or a learner's, which holds what stands under ``learners/``.
        key: in a flat result.
        value: of the iteration, or a part of it.
    """
    logger.log_value(_logged_path(key), value, reduce=_kind(key))


def log_time(logger: MetricsLogger, key: str) -> AbstractContextManager[Any]:
    """Log the seconds that the block takes; arguments as :func:`log`."""
    timer: AbstractContextManager[Any] = logger.log_time(_logged_path(key), reduce=_kind(key))
    return timer


def peek(logger: MetricsLogger, key: str) -> float | None:
    """The driver's value in the iteration that is under way; ``None`` where there is none yet."""
    value = logger.peek(tuple(key.split("/")), default=_MISSING)
    return None if value is _MISSING or value is None else float(value)


def _logged_path(key: str) -> tuple[str, ...]:
    return tuple(key.removeprefix("learners/").split("/"))


def _kind(key: str) -> Kind:
    return METRICS[table_key(key)].kind if table_key(key) in METRICS else "mean"


def table_key(key: str) -> str:
    """The key of the table's row that describes a metric; that of a named reward holds its name."""
    return next((f"{prefix}NAME_mean" for prefix in _NAMED_REWARDS if key.startswith(prefix)), key)


def metrics_table(group: MetricGroup) -> str:
    """The group as a table of Markdown."""
    lines = ["| metric | definition |", "| --- | --- |"]
    lines += [f"| `{metric.name}` | {metric.meaning} |" for metric in group.metrics]
    return "\n".join(lines) + "\n"

"""Table of all logged metrics: name, kind and meaning.

Loggers, checks of metric names, charts, the terminal output and the documentation use the table. A test fails if the package
logs a metric that is not in the table; a user's own training method may log others.
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
"""RLlib's reduction of the values that are logged within an iteration.

``"item"`` is logged once per iteration: the driver computes rates and means from sums over all of the iteration's rollouts
(RLlib's own merge of means would give env runners equal weights).
"""


@dataclass(frozen=True)
class Metric:
    """One logged number.

    Attributes:
        name: ``/``-joined key after the prefix of its group.
        kind: reduction of the logged values, see :data:`Kind`.
        meaning: one line of Markdown.
    """

    name: str
    kind: Kind
    meaning: str


@dataclass(frozen=True)
class MetricGroup:
    """Metrics with a common key prefix, which one component of a run logs.

    Attributes:
        name: name of the group's table in the documentation.
        prefix: prefix of the metrics' keys in a result.
        metrics: metrics of the group.
    """

    name: str
    prefix: str
    metrics: tuple[Metric, ...]


def _group(name: str, prefix: str, kind: Kind, meanings: Mapping[str, str | tuple[Kind, str]]) -> MetricGroup:
    """Return a group of metrics; ``kind`` applies to all metrics whose entry has no kind of its own."""
    described = {key: (kind, entry) if isinstance(entry, str) else entry for key, entry in meanings.items()}
    return MetricGroup(name, prefix, tuple(Metric(key, *entry) for key, entry in described.items()))


_ROLLOUTS = _group(
    "rollouts",
    ENV_RUNNERS,
    "item",
    {
        "success_rate": "share of episodes that solved their task",
        "score_mean": "mean over episodes of the environment's score",
        "episode_return_mean": "mean over episodes of the undiscounted sum of rewards",
        "episode_return_min": "smallest sum of rewards of an episode",
        "episode_return_max": "largest sum of rewards of an episode",
        "episode_len_mean": "mean over episodes of the turns taken",
        "episode_len_min": "turns of the shortest episode",
        "episode_len_max": "turns of the longest episode",
        "truncated_rate": "share of episodes truncated by a limit on turns or prompt tokens",
        "num_episodes": ("sum", "episodes played to their end"),
        "num_episodes_lifetime": ("lifetime_sum", "episodes played to their end in the run so far"),
        "num_failed_episodes": (
            "sum",
            "episodes aborted by an engine or environment error; excluded from all other metrics",
        ),
        "num_env_steps_sampled": ("sum", "turns taken"),
        "num_env_steps_sampled_lifetime": ("lifetime_sum", "turns taken in the run so far"),
        "num_prompt_tokens": ("sum", "prompt tokens over turns"),
        "num_response_tokens": ("sum", "response tokens over turns"),
        "num_reasoning_tokens": ("sum", "response tokens that are reasoning, `</think>` included"),
        "invalid_response_rate": "share of turns whose response lacks the required format",
        "invalid_action_rate": "share of turns whose action the environment reported as invalid",
        "cut_response_rate": "share of turns whose response reached `max_response_tokens`",
        "cut_history_rate": "share of turns whose prompt lost history to `max_prompt_tokens`",
        "cut_observation_rate": "share of turns whose prompt also lost a part of the observation",
        "num_branches": ("sum", "calls of programs that do not continue an earlier call with its answer"),
        "num_refused_calls": (
            "sum",
            "calls of programs that got an error: for a mistake of the call, or a limit of the episode",
        ),
        "num_cancelled_calls": ("sum", "calls of programs that their client gave up; their responses are not trained"),
        "taken_prompt_rate": "share of the prompt tokens of programs' calls that are the ids of an earlier call and its answer",
        "rewards/NAME_mean": ("mean over the episodes that report the reward NAME, of its sum over the episode"),
    },
)
_TRAINING_ONLY = (
    "_lifetime",
    "num_failed_episodes",
    "_tokens",
    "invalid_",
    "cut_",
    "_branches",
    "_calls",
    "taken_",
)
"""Parts of the names of metrics that are logged only for training rollouts."""
_EVALUATION = _group(
    "evaluation",
    EVALUATION,
    "item",
    {
        metric.name: metric.meaning
        for metric in _ROLLOUTS.metrics
        if not any(part in metric.name for part in _TRAINING_ONLY)
    },
)
_LEARNER = _group(
    "learner",
    LEARNER,
    "mean",
    {
        "grpo/surrogate_loss": r"$L_{GRPO}$, token mean of the clipped surrogate",
        "trial/dense_loss": r"$L_{dense}$ (TRIAL paper, Eq. 7), before coefficient and clamp; logged during warm-up too",
        "trial/turn_score_mean": "mean over turn rows of $s_k$ (TRIAL paper, Eq. 5), nats per token",
        "trial/turn_weight_std": "standard deviation over turn rows of the applied weights $w_k$",
        "trial/gap_mean": r"mean over tokens of $\Delta^{old}$; above 0 if hindsight confirms the responses on average",
        "trial/returns_fallen": (
            "iterations since `trial/return_recent` first was below `trial/return_before`; 0: it was not"
        ),
        "trial/return_before": "mean return of the last 4 iterations without λ",
        "trial/return_recent": "mean return of the last 4 iterations with λ",
        "trial/clamp_saturated_fraction": (
            "share of microbatches without dense gradient because of the clamp (TRIAL paper, Eq. 8); 0 during warm-up"
        ),
        "trial/hindsight_coeff": r"$\lambda_g$",
        "trial/gradient_ratio": (
            "norm of the dense term's gradient, with λ and clamp, over that of the outcome loss; with respect to the logits, "
            "estimated from the sampled tokens"
        ),
        "grpo/entropy": "token mean of the policy's entropy, nats",
        "grpo/kl": (
            "token mean of k3 against the frozen initial policy, nats; without a reference model (`ref_kl_coeff=0`), against "
            r"$\pi_{old}$"
        ),
        "grpo/update_kl": (
            r"token mean of k3 of the updated policy against $\pi_{old}$, nats, over the first microbatch; not with sharding"
        ),
        "grpo/clip_fraction": "share of tokens whose ratio is outside the clip range",
        "grpo/ratio_mean": r"token mean of $r_t = \pi_\theta / \pi_{old}$ before clipping, each at most $e^{20}$",
        "total_loss": "mean over optimizer steps of the minibatch's loss $L$ (TRIAL paper, Eq. 8)",
        "teacher/logprob_diff": r"with `teacher_model`: mean over the sampled tokens of \|log π_T − log π_old\|, nats",
        "teacher/kl": r"with `teacher_model`: mean of $r - 1 - \log r$, $r = \pi_T / \pi_{old}$, an estimate of KL(π_old ‖ π_T)",
        "engine/logprob_diff": (
            r"trainer–sampler mismatch: mean of \|learner's $\log \pi_{old}$ − engine's log-probability\|, nats, "
            "over rows of the current version (0 without such rows); above `max_logprob_diff`, or with NaN in any "
            "row, nothing is trained and the run stops"
        ),
        "engine/logprob_diff_max": ("max", "the largest of these differences"),
        "engine/ratio_mean": (
            r"mean of the importance ratio $r = \pi_{old} / \pi_{engine}$ over all tokens, each at most $e^{20}$, "
            "before the cap"
        ),
        "engine/ratio_max": ("max", "largest importance ratio of a token"),
        "engine/kl": r"mean of $r - 1 - \log r$, an estimate of $\mathrm{KL}(\pi_{engine} \| \pi_{old})$",
        "engine/effective_sample_size": r"$(\sum r)^2 / (T \sum r^2)$, in (0, 1]",
        "engine/bounded_fraction": "share of tokens whose weight is `importance_cap` or masked",
        "num_module_steps_trained": ("sum", "trained turn rows, counted by the learners"),
        "num_module_steps_trained_lifetime": ("lifetime_sum", "turn rows trained in the run so far"),
        "rows/skipped": ("sum", "turn rows of steps skipped for non-finite gradients"),
        "skipped_updates": ("sum", "optimizer steps skipped for non-finite gradients"),
        "rows/staleness_mean": (
            "versions by which the weights that sampled a turn are older than those trained on it, mean over turn rows"
        ),
        "rows/staleness_max": ("max", "largest number of versions by which the weights of a turn were older"),
        "rows/lost_groups": ("sum", "groups lost with the env runner that had sampled them"),
        "scoring/tokens_forwarded": ("sum", "model inputs of scoring, before the first step"),
        "scoring/tokens_distinct": ("sum", "distinct prefixes of the scored rows"),
        "scoring/seconds": (
            "max",
            "time of scoring (contexts, passes without gradients, the method's preparation), slowest learner",
        ),
        "update/tokens_forwarded": (
            "sum",
            "model inputs of the update's passes, two of a row whose microbatch is split for memory "
            "([scaling.md](scaling.md#shared-prefixes))",
        ),
        "update/tokens_distinct": ("sum", "distinct prefixes of the rows of these passes"),
        "update/seconds": ("max", "time of the iteration's optimizer steps, slowest learner"),
        "update/tokens_trained": ("sum", "prompt and response tokens of the trained rows, once an epoch"),
    },
)
_METHODS = _group(
    "methods",
    LEARNER,
    "mean",
    {
        "sdar/dense_loss": "−mean of the gate times log π_θ, before μ",
        "sdar/gate_mean": "mean over tokens of σ(β δ_θ); 0.5 throughout for `grpo_opsd`",
        "sdar/gap_mean": "mean over tokens of δ_θ, nats",
        "rlsd/rescaling": "λ of the iteration",
        "rlsd/gap_mean": r"mean over tokens of log π_T(y\|h⁺) − log π_old(y\|h), nats, before any bound",
        "serl/rescaling": "λ of the iteration",
        "serl/gap_mean": "as `rlsd/gap_mean`",
        "serl/action_token_fraction": "share of rescaled tokens; 0: no response had both tags, and SERL is GRPO",
        "opsd/dense_loss": "`jsd`: mean divergence, nats per token; `sampled`: −mean of δ_θ log π_θ",
        "opd/dense_loss": "distillation loss: −mean of the log-ratio of teacher and policy times π_θ / π_old, or divergence",
        "opd/gap_mean": "as `sdar/gap_mean`",
        "opd/depth": "with `curriculum_iterations`: turns of each rollout that are distilled",
        "gigpo/step_advantage_std": "standard deviation of $A_{step}$ over turn rows, before ω",
        "gigpo/shared_anchor_fraction": "share of turn rows whose observation occurs more than once in their group",
        "stepopsd/rescaling": "λ of the iteration",
        "stepopsd/gap_mean": "as `rlsd/gap_mean`",
        "stepopsd/step_factor_std": "standard deviation of f_k over turn rows; 0 if all steps have equal weight",
        "agentopsd/gap_mean": "as `rlsd/gap_mean`",
        "agentopsd/revision_mean": r"mean over turn rows of \|ΔB_k\|",
        "agentopsd/factor_std": "standard deviation of w_k over turn rows",
        "sdpo/dense_loss": "`jsd`: mean weighted divergence, nats per token; `sampled`: −mean of min(ρ, C) δ_θ log π_θ",
        "sdpo/context_fraction": "share of turn rows with a teacher context, from which alone is learned",
        "skill_sd/dense_loss": "self-distillation before λ, nats per token",
        "skill_sd/gap_mean": "as `sdar/gap_mean`",
        "adrs/gate_mean": "mean of g over turn rows",
        "adrs/term_size_mean": "mean size of the terms that are added to the advantages of tokens",
    },
)
_DRIVER = _group(
    "driver",
    "",
    "sum",
    {
        "rows/sampled": "turn rows of all completed rollouts",
        "rows/given_to_learners": "turn rows of trained groups",
        "rows/left_out": "turn rows of dropped groups",
        "rows/redrawn": "turn rows of resampled groups: fewer than 2 rollouts completed, or their env runner was lost",
        "rows/stale": (
            "turn rows dropped and resampled because their weights were too old, or because they were in flight "
            "when the effective sample size was too small"
        ),
        "rows/in_flight": "turn rows of finished groups that wait for a later update",
        "groups/num_trained": "groups trained",
        "groups/num_dropped": "groups dropped: fewer than 2 completed rollouts, or no variance with `drop_zero_variance_groups`",
        "groups/num_too_long": (
            "groups dropped because the first prompt of their task exceeds `max_prompt_tokens`; a warning names "
            "each task"
        ),
        "groups/num_refilled": "tasks drawn to replace groups without variance (`max_refills`)",
        "groups/num_stale": "groups whose rows `rows/stale` counts",
        "groups/num_in_flight": "groups, finished or not, that wait for a later update when this one starts",
        "groups/num_of_several_versions": "trained groups that several versions of the weights sampled",
        "groups/num_on_policy_iterations": "1 if a small effective sample size made the iteration on-policy",
        "groups/num_empty_iterations": "1 if the iteration trained nothing; a warning gives the reason",
        "groups/zero_variance_fraction": (
            "item",
            "share of groups with at least 2 completed rollouts in which the method's advantages of all turns are 0: all "
            "earned the same `reward`, up to rounding, and no penalty or term of the method makes a difference",
        ),
        "groups/unequal_start_fraction": (
            "item",
            "share of groups whose rollouts begin with different observations; a warning names the first one",
        ),
        "tasks/seen_fraction": ("item", 'with `task_sampling="success_rate"`: share of the tasks that were played'),
        "tasks/effective_fraction": (
            "item",
            "effective number of the tasks that are drawn from, 1 / Σ chance², as a share of all",
        ),
        **{
            f"tasks/success_rate_p{percent}": ("item", f"{percent}th percentile of the played tasks' success rates")
            for percent in (10, 50, 90)
        },
        "health_checks/num_failed": "failed [health checks](reliability.md#health-checks-of-the-policy)",
        "actors/num_engines": ("item", "engines when the iteration started"),
        "actors/num_env_runners": ("item", "env-runner actors when the iteration started"),
        "seconds/sampling": "seconds of the iteration that the driver spent sampling",
        "seconds/update": "in the learner update, including scoring",
        "seconds/sync": "sending weights",
        "seconds/evaluation": "in evaluation",
    },
)
_RLLIB = _group(
    "rllib",
    "",
    "item",
    {
        "training_iteration": ("lifetime_sum", "iterations so far"),
        "time_total_s": ("lifetime_sum", "seconds of all iterations so far"),
        "time_this_iter_s": "seconds of this iteration",
        "num_env_steps_sampled_lifetime": ("lifetime_sum", "turns taken in the run so far"),
        "num_training_step_calls_per_iteration": ("sum", "1"),
        "timers/training_iteration": "mean seconds of an iteration without its evaluation",
        "timers/training_step": "mean seconds of sampling, update and sync",
        "timers/restore_env_runners": "mean seconds of connecting restarted env runners",
        "timers/evaluation_iteration": "mean seconds of an evaluation",
        "fault_tolerance/num_healthy_workers": "env runners that can play",
        "fault_tolerance/num_remote_worker_restarts": "restarts of env runners so far",
        "fault_tolerance/num_env_runners_dropped_lifetime": "env runners replaced for being late so far",
        "env_runner_group/actor_manager_num_outstanding_async_reqs": "pending calls of RLlib itself",
    },
)

GROUPS = (_ROLLOUTS, _EVALUATION, _LEARNER, _METHODS, _DRIVER, _RLLIB)
METRICS: Mapping[str, Metric] = {group.prefix + metric.name: metric for group in GROUPS for metric in group.metrics}
"""Metrics by their ``/``-joined keys in a result; RLlib's own metrics are only partly included."""

COLUMNS = {
    f"{ENV_RUNNERS}success_rate": ("success", "{:.1%}"),
    f"{ENV_RUNNERS}episode_return_mean": ("return", "{:.2f}"),
    f"{ENV_RUNNERS}episode_len_mean": ("turns", "{:.1f}"),
    f"{LEARNER}grpo/surrogate_loss": ("surrogate", "{:+.2e}"),
    f"{LEARNER}trial/dense_loss": ("dense", "{:+.2e}"),
    f"{LEARNER}trial/clamp_saturated_fraction": ("saturated", "{:.0%}"),
    f"{LEARNER}grpo/kl": ("kl", "{:.1e}"),
    f"{LEARNER}engine/logprob_diff": ("logprob diff", "{:.1e}"),
}
"""Heading and format, by key, of the metrics that the terminal shows for each iteration."""

EVALUATION_SUCCESS = f"{EVALUATION}success_rate"
TRAINING_SUCCESS = f"{ENV_RUNNERS}success_rate"
EFFECTIVE_SAMPLE_SIZE = f"{LEARNER}engine/effective_sample_size"
TURN_SCORE = f"{LEARNER}trial/turn_score_mean"
PROFILE_STD = f"{LEARNER}trial/turn_weight_std"

_NAMED_REWARDS = [f"{prefix}rewards/" for prefix in (ENV_RUNNERS, EVALUATION)]

_MISSING = object()
"""Default for a metric that was not logged; RLlib treats ``None`` as no default."""


def log(logger: MetricsLogger, key: str, value: float) -> None:
    """Log a number with the metric's reduction in :data:`METRICS`; a metric that is not in ``METRICS`` is logged as a mean.

    Args:
        logger: RLlib's logger of the driver or of a learner.
        key: ``/``-joined key of the metric in a result; a prefix ``learners/``, which RLlib adds, is removed before logging.
        value: the iteration's value, or one of several values that the metric's reduction combines.
    """
    logger.log_value(_logged_path(key), value, reduce=_kind(key))


def log_time(logger: MetricsLogger, key: str) -> AbstractContextManager[Any]:
    """Return a context manager that logs the duration of its block in seconds; arguments as in :func:`log`."""
    return logger.log_time(_logged_path(key), reduce=_kind(key))


def peek(logger: MetricsLogger, key: str) -> float | None:
    """Return a metric's value in the current iteration from the driver's logger; ``None`` if it is not logged yet."""
    value = logger.peek(tuple(key.split("/")), default=_MISSING)
    return None if value is _MISSING or value is None else float(value)


def _logged_path(key: str) -> tuple[str, ...]:
    return tuple(key.removeprefix("learners/").split("/"))


def _kind(key: str) -> Kind:
    return METRICS[table_key(key)].kind if table_key(key) in METRICS else "mean"


def table_key(key: str) -> str:
    """Return a metric's key in :data:`METRICS`; the key of named rewards has ``NAME`` in place of the reward's name."""
    return next((f"{prefix}NAME_mean" for prefix in _NAMED_REWARDS if key.startswith(prefix)), key)

"""Health checks: stop diverged runs by the metrics of each iteration."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trial_ray.config.training import GuardSettings
from trial_ray.errors import TrainingDivergedError
from trial_ray.metrics import ENV_RUNNERS, LEARNER, log, peek

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

logger = logging.getLogger(__name__)

ARMED_BY = 10.0
"""A guard against a collapse watches once its metric has been so many times better than the limit: a policy that never was
any better has not collapsed, it has not learned yet."""
SUDDEN_PATIENCE = 2
"""Iterations in a row after which a collapse is believed that came from one iteration to the next: no policy that still learns
loses all that armed the guard in one update."""
ARMED_CUT_RATE = 0.5
"""The same for the share of responses at the length limit, which is at most twice as good as its limit of 1."""


Values = Mapping[str, float | None]
"""What an iteration logged, by name; ``None`` where it logged nothing of it."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One thing that must not go on.

    Attributes:
        name: of the setting that limits it.
        value: what is guarded, of an iteration's values; ``None`` where there is nothing to say.
        violated: of the value and the limit.
        armed: of the value and the limit, whether the policy was good enough once for the guard to watch it from then on.
        says: what was found, with its value.
        advice: what to change.
    """

    name: str
    value: Callable[[Values], float | None]
    violated: Callable[[float, float], bool]
    armed: Callable[[float, float], bool]
    says: str
    advice: str

    @property
    def of_collapse(self) -> bool:
        """Whether there is a good side, far from the limit, that a policy can fall from."""
        return self.armed is not _always


def _finite(values: Values) -> float | None:
    """Number of the learner's central metrics that are not finite."""
    found = [value for name, value in values.items() if name in FINITE and value is not None]
    return float(sum(not math.isfinite(value) for value in found)) if found else None


def _largest_ratio(values: Values) -> float | None:
    found = [value for name in ("grpo/ratio_mean", "engine/ratio_mean") if (value := values.get(name)) is not None]
    return max(found, default=None)


def _mean_length(values: Values) -> float | None:
    tokens, turns = values.get("num_response_tokens"), values.get("num_env_steps_sampled")
    return tokens / turns if tokens is not None and turns else None


def _valid_rate(values: Values) -> float | None:
    """A turn is invalid by its form or by its action; at least the larger share of the two is."""
    found = [
        value for name in ("invalid_response_rate", "invalid_action_rate") if (value := values.get(name)) is not None
    ]
    return 1.0 - max(found) if found else None


def _always(value: float, limit: float) -> bool:
    return True


def _above(value: float, limit: float) -> bool:
    return value > limit


def _below(value: float, limit: float) -> bool:
    return value < limit


FINITE = ("total_loss", "grpo/surrogate_loss", "grpo/entropy", "grpo/kl", "grpo/clip_fraction")
LEARNER_METRICS = (*FINITE, "grpo/ratio_mean", "engine/ratio_mean")
RUNNER_METRICS = (
    "num_response_tokens",
    "num_env_steps_sampled",
    "cut_response_rate",
    "invalid_response_rate",
    "invalid_action_rate",
)
GUARDS = (
    Guard(
        "finite",
        _finite,
        _above,
        _always,
        "{value:g} of the losses are not finite: steps are skipped in every iteration",
        "lower lr, or look for responses and rewards that are out of the ordinary",
    ),
    Guard(
        "max_kl",
        lambda values: values.get("grpo/kl"),
        _above,
        _always,
        "the KL divergence grpo/kl is {value:.3g} nats a token (max_kl={limit:g})",
        "lower lr, or raise kl_coeff",
    ),
    Guard(
        "max_mean_ratio",
        _largest_ratio,
        _above,
        _always,
        "the mean importance ratio is {value:.3g} (max_mean_ratio={limit:g})",
        "lower lr or num_epochs; with max_staleness, sample by newer weights",
    ),
    Guard(
        "min_entropy",
        lambda values: values.get("grpo/entropy"),
        _below,
        lambda value, limit: value >= ARMED_BY * limit,
        "the entropy has collapsed to {value:.3g} nats a token (min_entropy={limit:g})",
        "raise entropy_coeff or kl_coeff, or lower lr",
    ),
    Guard(
        "min_response_tokens",
        _mean_length,
        _below,
        lambda value, limit: value >= 2 * limit,
        "responses have collapsed to {value:.3g} tokens on average (min_response_tokens={limit:g})",
        "raise kl_coeff, lower lr, or check that the reward does not pay for saying nothing",
    ),
    Guard(
        "max_cut_response_rate",
        lambda values: values.get("cut_response_rate"),
        lambda value, limit: value >= limit,
        lambda value, limit: value <= ARMED_CUT_RATE * limit,
        "{value:.1%} of the responses end at max_response_tokens (max_cut_response_rate={limit:g})",
        "raise max_response_tokens or kl_coeff, or lower lr",
    ),
    Guard(
        "min_valid_rate",
        _valid_rate,
        _below,
        lambda value, limit: value >= ARMED_BY * limit,
        "only {value:.2%} of the turns are valid (min_valid_rate={limit:g})",
        "raise invalid_action_penalty or kl_coeff, or lower lr",
    ),
)


@dataclass(slots=True)
class GuardStates:
    """State of the guards between iterations.

    Attributes:
        armed: names of the guards that watch.
        in_a_row: iterations in a row in which each guard was violated, up to the last one.
        well: names of the guards against a collapse whose value would have armed them in the last iteration.
        sudden: names of those that were violated in the iteration after such a one, and since then.
        verdict: why the next iteration must not begin; empty where it may.
    """

    armed: list[str] = field(default_factory=list)
    in_a_row: dict[str, int] = field(default_factory=dict)
    well: list[str] = field(default_factory=list)
    sudden: list[str] = field(default_factory=list)
    verdict: str = ""

    def forget(self, name: str) -> None:
        """Drop everything remembered of a guard."""
        self.in_a_row.pop(name, None)
        for names in (self.armed, self.well, self.sudden):
            names[:] = [each for each in names if each != name]


class Guards:
    """Checks every iteration's metrics; warns, and stops a run whose policy has diverged.

    One iteration may be noise, so it takes ``guard_patience`` of them in a row, or :data:`SUDDEN_PATIENCE` after a collapse from
    one iteration to the next.

    Args:
        settings: limits.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._states = GuardStates()

    @property
    def suspect(self) -> bool:
        """Whether a guard is on its way to a stop, so that the state should take no good checkpoint's place."""
        return self._settings.guard_action == "stop" and bool(self._states.in_a_row)

    def require_healthy(self) -> None:
        """Refuse another iteration with a diverged policy.

        Raises:
            TrainingDivergedError: says what was found for how long, and what to change.
        """
        if self._states.verdict:
            raise TrainingDivergedError(self._states.verdict)

    def look(self, iteration: int, metrics: MetricsLogger, *, trained: bool) -> None:
        """Look at what an iteration logged, and log how many guards it violates.

        Args:
            iteration: counted from 1.
            metrics: of the iteration, which is not over.
            trained: whether there was an update; without one the learner's metrics are those of an earlier one.
        """
        values = {name: peek(metrics, f"{LEARNER}{name}") for name in (LEARNER_METRICS if trained else ())}
        values |= {name: peek(metrics, f"{ENV_RUNNERS}{name}") for name in RUNNER_METRICS}
        log(metrics, "guards/num_violated", self.judge(iteration, values))

    def judge(self, iteration: int, values: Values) -> int:
        """Count the guards that the values of an iteration violate; warn of each, and note a verdict."""
        states, settings = self._states, self._settings
        for guard in GUARDS:
            limit = 0.0 if guard.name == "finite" else getattr(settings, guard.name)
            value = guard.value(values)
            if limit is None:
                states.forget(guard.name)  # the run may have watched it up to the checkpoint that it continues from
                continue
            if value is None:
                continue  # neither a violation nor its end
            fell = guard.name in states.well
            states.well = [name for name in states.well if name != guard.name]
            if guard.armed(value, limit):
                states.armed += [guard.name] * (guard.name not in states.armed)
                states.well += [guard.name] * guard.of_collapse
            if guard.name not in states.armed or not guard.violated(value, limit):
                states.in_a_row.pop(guard.name, None)
                states.sudden = [name for name in states.sudden if name != guard.name]
                continue
            states.in_a_row[guard.name] = states.in_a_row.get(guard.name, 0) + 1
            states.sudden += [guard.name] * fell
            self._tell(guard, iteration, guard.says.format(value=value, limit=limit))
        return len(states.in_a_row)

    def _tell(self, guard: Guard, iteration: int, found: str) -> None:
        count, patience = self._states.in_a_row[guard.name], self._settings.guard_patience
        if guard.name in self._states.sudden:
            patience = min(patience, SUDDEN_PATIENCE)
        stops = self._settings.guard_action == "stop"
        if stops and count >= patience:
            self._states.verdict = (
                f"Stopped after iteration {iteration}: {found}, for {count} iterations in a row. Continue from the last "
                f"checkpoint with other settings: {guard.advice}."
            )
        upshot = (
            f"{count} of {patience} iterations in a row after which the run stops" if stops else f"{count} in a row"
        )
        logger.warning("iteration %d: %s; %s. %s", iteration, found, upshot, guard.advice.capitalize())

    def get_state(self) -> dict[str, Any]:
        """State for a resumed run."""
        states = self._states
        return {
            "armed": list(states.armed),
            "in_a_row": dict(states.in_a_row),
            "well": list(states.well),
            "sudden": list(states.sudden),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken; the verdict follows from the present settings."""
        self._states = GuardStates(
            list(state["armed"]),
            dict(state["in_a_row"]),
            well=list(state.get("well", [])),  # checkpoints of earlier versions lack these two
            sudden=list(state.get("sudden", [])),
        )

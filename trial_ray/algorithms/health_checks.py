"""Health checks: warn, and stop a run, if the metrics of its iterations show that the policy has diverged."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trial_ray.config.training import HealthCheckSettings
from trial_ray.errors import TrainingDivergedError
from trial_ray.metrics import ENV_RUNNERS, LEARNER, log, peek

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

logger = logging.getLogger(__name__)

SUDDEN_PATIENCE = 2
"""Number of failed iterations in a row that stop a run after a sudden collapse. A collapse is sudden if a single update moves
the value of a check from the level at which the check becomes active (``armed_at``) to a value that fails the check."""
LOSSES = ("total_loss", "grpo/surrogate_loss", "grpo/entropy", "grpo/kl", "grpo/clip_fraction")
UPDATE_KL = f"{LEARNER}grpo/update_kl"
INVALID_RATES = (f"{ENV_RUNNERS}invalid_response_rate", f"{ENV_RUNNERS}invalid_action_rate")
MIN_INVALID_RATE = 0.1
"""Minimum share of invalid turns for the warning that an update has at least doubled the share."""


class HealthCheck(NamedTuple):
    """One check of a run's metrics.

    Attributes:
        name: name of the setting with the check's limit, which is a minimum if the name starts with ``min``; ``"finite"`` is not
            a setting and has the limit 1.
        metrics: names of the metrics that the check reads.
        value: function that computes the checked value from those of ``metrics`` that were logged, at least one; it returns
            ``None`` if these metrics do not determine the value.
        armed_at: multiple of the limit that the value must reach before the check becomes active, since a policy that was never
            better has not collapsed; ``None`` if the check is always active.
        message: text of the warning, with placeholders for the value and the limit.
        advice: recommended changes.
    """

    name: str
    metrics: Sequence[str]
    value: Callable[[list[float]], float | None]
    armed_at: float | None
    message: str
    advice: str


HEALTH_CHECKS = (
    HealthCheck(
        "finite",
        [f"{LEARNER}{name}" for name in LOSSES],
        lambda losses: float(sum(not math.isfinite(loss) for loss in losses)),
        None,
        "{value:g} of the losses are not finite: steps are skipped in every iteration",
        "lower lr, or look for unusual responses and rewards",
    ),
    HealthCheck(
        "max_kl",
        [f"{LEARNER}grpo/kl"],
        max,
        None,
        "the KL divergence grpo/kl is {value:.3g} nats per token (max_kl={limit:g})",
        "lower lr, or raise ref_kl_coeff",
    ),
    HealthCheck(
        "max_mean_ratio",
        [f"{LEARNER}grpo/ratio_mean", f"{LEARNER}engine/ratio_mean"],
        max,
        None,
        "the mean importance ratio is {value:.3g} (max_mean_ratio={limit:g})",
        "lower lr or num_epochs; with max_staleness, sample with newer weights",
    ),
    HealthCheck(
        "min_entropy",
        [f"{LEARNER}grpo/entropy"],
        max,
        10.0,
        "the entropy has collapsed to {value:.3g} nats per token (min_entropy={limit:g})",
        "raise entropy_coeff or ref_kl_coeff, or lower lr",
    ),
    HealthCheck(
        "min_response_tokens",
        [f"{ENV_RUNNERS}num_response_tokens", f"{ENV_RUNNERS}num_env_steps_sampled"],
        lambda counts: counts[0] / counts[1] if len(counts) == 2 and counts[1] else None,
        2.0,
        "responses have collapsed to {value:.3g} tokens on average (min_response_tokens={limit:g})",
        "raise ref_kl_coeff, lower lr, or check that empty responses are not rewarded",
    ),
    HealthCheck(
        "max_cut_response_rate",
        [f"{ENV_RUNNERS}cut_response_rate"],
        max,
        0.5,
        "{value:.1%} of the responses end at max_response_tokens (max_cut_response_rate={limit:g})",
        "raise max_response_tokens or ref_kl_coeff, or lower lr",
    ),
    HealthCheck(
        "min_valid_rate",
        # A turn is invalid because of its response or its action, so the share of invalid turns is at least the larger rate.
        [*INVALID_RATES],
        lambda rates: 1.0 - max(rates),
        10.0,
        "only {value:.2%} of the turns are valid (min_valid_rate={limit:g})",
        "raise invalid_action_penalty or ref_kl_coeff, or lower lr",
    ),
)


class HealthChecks:
    """Checks the metrics of every iteration, warns, and stops a run with a diverged policy.

    A single iteration may be noise: the run stops after ``health_check_patience`` consecutive failures of a check, or after at most
    :data:`SUDDEN_PATIENCE` if a check failed suddenly, from one iteration to the next.

    Args:
        settings: limits of the checks.
    """

    def __init__(self, settings: HealthCheckSettings) -> None:
        self._settings = settings
        self.set_state({"armed": (), "in_a_row": {}, "well": (), "sudden": (), "last_invalid_rates": ()})

    @property
    def suspect(self) -> bool:
        """True if a check that may stop the run fails; the current state should then not replace a good checkpoint."""
        return self._settings.health_check_action == "stop" and bool(self._in_a_row)

    def require_healthy(self) -> None:
        """Raise an error if the policy has diverged.

        Raises:
            TrainingDivergedError: the policy has diverged; the message contains the finding, its duration and recommended
                changes.
        """
        if self._verdict:
            raise TrainingDivergedError(self._verdict)

    def check_iteration(self, iteration: int, metrics: MetricsLogger, *, trained: bool) -> None:
        """Check the metrics of an iteration, and log the number of failed checks.

        Args:
            iteration: counted from 1.
            metrics: metrics of the current iteration.
            trained: whether there was an update; without an update, the learner's metrics are from an earlier iteration.
        """
        read = {UPDATE_KL, *(name for check in HEALTH_CHECKS for name in check.metrics)}
        names = {name for name in read if trained or not name.startswith(LEARNER)}
        log(metrics, "health_checks/num_failed", self.check(iteration, {name: peek(metrics, name) for name in names}))

    def check(self, iteration: int, metrics: Mapping[str, float | None]) -> int:
        """Return the number of failed checks; warn of each, and remember whether the run must stop.

        Args:
            iteration: counted from 1.
            metrics: metrics of the iteration by name; ``None`` for a metric that was not logged.
        """
        for check in HEALTH_CHECKS:
            name = check.name
            limit = 1.0 if name == "finite" else getattr(self._settings, name)
            values = [metric for key in check.metrics if (metric := metrics.get(key)) is not None]
            value = check.value(values) if values else None
            if limit is None:
                # The check is switched off: drop its state, which may be from a checkpoint.
                for names in (self._armed, self._well, self._sudden):
                    names.discard(name)
                self._in_a_row.pop(name, None)
                continue
            if value is None:
                continue  # Without a value the check neither fails nor passes.
            was_well = name in self._well
            self._well.discard(name)
            is_minimum = name.startswith("min")
            if check.armed_at is None:
                self._armed.add(name)
            elif value >= check.armed_at * limit if is_minimum else value <= check.armed_at * limit:
                self._armed.add(name)
                self._well.add(name)
            if name in self._armed and (value < limit if is_minimum else value >= limit):
                self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
                self._sudden |= {name} if was_well else set()
                self._warn(check, iteration, check.message.format(value=value, limit=limit))
            else:
                self._in_a_row.pop(name, None)
                self._sudden.discard(name)
        self._warn_of_large_update(iteration, metrics)
        return len(self._in_a_row)

    def _warn_of_large_update(self, iteration: int, metrics: Mapping[str, float | None]) -> None:
        """Warn if one update moved the policy so far that the policy may have lost what it had learned."""
        limit, kl = self._settings.max_update_kl, metrics.get(UPDATE_KL)
        rates = [rate for name in INVALID_RATES if (rate := metrics.get(name)) is not None]
        before = max(self._last_invalid_rates, default=None)
        self._last_invalid_rates[:] = rates
        if limit is None:
            return
        signs = []
        if kl is not None and not kl <= limit:
            signs.append(f"the update moved the policy by {kl:.3g} nats per token (max_update_kl={limit:g})")
        if before is not None and rates and max(rates) >= max(2 * before, MIN_INVALID_RATE):
            signs.append(f"the share of invalid turns rose from {before:.0%} to {max(rates):.0%} after the last update")
        if signs:
            logger.warning(
                "iteration %d: %s. Lower lr, or take fewer steps (a larger minibatch_rows, a smaller num_epochs). If the policy "
                "no longer succeeds at all, all returns are equal and nothing trains it: continue from an earlier checkpoint",
                iteration,
                ", and ".join(signs),
            )

    def _warn(self, check: HealthCheck, iteration: int, finding: str) -> None:
        count, patience = self._in_a_row[check.name], self._settings.health_check_patience
        if check.name in self._sudden:
            patience = min(patience, SUDDEN_PATIENCE)
        consequence = f"{count} in a row"
        if self._settings.health_check_action == "stop":
            consequence = f"{count} of {patience} iterations in a row after which the run stops"
            if count >= patience:
                self._verdict = (
                    f"Stopped after iteration {iteration}: {finding}, for {count} iterations in a row. Continue from the last "
                    f"checkpoint with other settings: {check.advice}."
                )
        logger.warning("iteration %d: %s; %s. %s", iteration, finding, consequence, check.advice.capitalize())

    def get_state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {
            "armed": sorted(self._armed),
            "well": sorted(self._well),
            "sudden": sorted(self._sudden),
            "in_a_row": dict(self._in_a_row),
            "last_invalid_rates": list(self._last_invalid_rates),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of :meth:`get_state`; the decision to stop is cleared, as it depends on the settings."""
        self._armed = set(state["armed"])
        self._in_a_row: dict[str, int] = dict(state["in_a_row"])
        """Number of consecutive iterations in which each check failed, among the iterations in which the check had a value."""
        self._well = set(state["well"])
        """Names of the checks whose value in the last iteration was at the level that makes them active (``armed_at``)."""
        self._sudden = set(state["sudden"])
        """Names of the checks that failed in every iteration since an iteration in which their value reached ``armed_at``."""
        self._last_invalid_rates: list[float] = list(state["last_invalid_rates"])
        """Values of the metrics in :data:`INVALID_RATES` in the last iteration."""
        self._verdict = ""

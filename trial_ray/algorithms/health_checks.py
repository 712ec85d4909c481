"""Health checks: stop diverged runs by the metrics of each iteration."""

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
"""Iterations in a row after which a collapse is believed that came from one iteration to the next: no policy that still learns
loses all that armed the check in one update."""
LOSSES = ("total_loss", "grpo/surrogate_loss", "grpo/entropy", "grpo/kl", "grpo/clip_fraction")


class HealthCheck(NamedTuple):
    """One thing that must not go on.

    Attributes:
        name: of the setting that limits it: a least value where it begins with ``min``.
        metrics: what it looks at.
        value: what is guarded, of those of the metrics that an iteration logged, at least one; ``None``: nothing to say.
        armed_at: multiple of the limit from which on the policy is so good that the check watches it from then on: one that never
            was any better has not collapsed, it has not learned yet. ``None``: the check always watches.
        says: what was found, with its value.
        advice: what to change.
    """

    name: str
    metrics: Sequence[str]
    value: Callable[[list[float]], float | None]
    armed_at: float | None
    says: str
    advice: str


HEALTH_CHECKS = (
    HealthCheck(
        "finite",
        [f"{LEARNER}{name}" for name in LOSSES],
        lambda found: float(sum(not math.isfinite(each) for each in found)),
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
        lambda found: found[0] / found[1] if len(found) == 2 and found[1] else None,
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
        # A turn is invalid by its form or by its action; at least the larger share of the two is.
        [f"{ENV_RUNNERS}invalid_response_rate", f"{ENV_RUNNERS}invalid_action_rate"],
        lambda found: 1.0 - max(found),
        10.0,
        "only {value:.2%} of the turns are valid (min_valid_rate={limit:g})",
        "raise invalid_action_penalty or ref_kl_coeff, or lower lr",
    ),
)


class HealthChecks:
    """Checks every iteration's metrics; warns, and stops a run whose policy has diverged.

    One iteration may be noise: it takes ``health_check_patience`` of them in a row, or :data:`SUDDEN_PATIENCE` after a collapse
    from one iteration to the next.

    Args:
        settings: limits.
    """

    def __init__(self, settings: HealthCheckSettings) -> None:
        self._settings = settings
        self.set_state({"armed": (), "in_a_row": {}})

    @property
    def suspect(self) -> bool:
        """Whether a check is on its way to a stop, so that the state should take no good checkpoint's place."""
        return self._settings.health_check_action == "stop" and bool(self._in_a_row)

    def require_healthy(self) -> None:
        """Reject another iteration with a diverged policy.

        Raises:
            TrainingDivergedError: says what was found for how long, and what to change.
        """
        if self._verdict:
            raise TrainingDivergedError(self._verdict)

    def look(self, iteration: int, metrics: MetricsLogger, *, trained: bool) -> None:
        """Look at what an iteration logged, and log how many checks it fails.

        Args:
            iteration: counted from 1.
            metrics: of the iteration, which is not over.
            trained: whether there was an update; without one the learner's metrics are those of an earlier one.
        """
        names = {name for check in HEALTH_CHECKS for name in check.metrics if trained or not name.startswith(LEARNER)}
        log(metrics, "health_checks/num_failed", self.judge(iteration, {name: peek(metrics, name) for name in names}))

    def judge(self, iteration: int, metrics: Mapping[str, float | None]) -> int:
        """Count the checks that the metrics of an iteration fail; warn of each, and note a verdict."""
        for check in HEALTH_CHECKS:
            name = check.name
            limit = 1.0 if name == "finite" else getattr(self._settings, name)
            found = [value for each in check.metrics if (value := metrics.get(each)) is not None]
            value = check.value(found) if found else None
            if limit is None:
                # The run may have watched it up to the checkpoint that it continues from.
                for remembered in (self._armed, self._well, self._sudden):
                    remembered.discard(name)
                self._in_a_row.pop(name, None)
                continue
            if value is None:
                continue  # neither a violation nor its end
            fell = name in self._well
            self._well.discard(name)
            least = name.startswith("min")
            if check.armed_at is None:
                self._armed.add(name)
            elif value >= check.armed_at * limit if least else value <= check.armed_at * limit:
                self._armed.add(name)
                self._well.add(name)
            if name in self._armed and (value < limit if least else value >= limit):
                self._in_a_row[name] = self._in_a_row.get(name, 0) + 1
                self._sudden |= {name} if fell else set()
                self._tell(check, iteration, check.says.format(value=value, limit=limit))
            else:
                self._in_a_row.pop(name, None)
                self._sudden.discard(name)
        return len(self._in_a_row)

    def _tell(self, check: HealthCheck, iteration: int, found: str) -> None:
        count, patience = self._in_a_row[check.name], self._settings.health_check_patience
        if check.name in self._sudden:
            patience = min(patience, SUDDEN_PATIENCE)
        upshot = f"{count} in a row"
        if self._settings.health_check_action == "stop":
            upshot = f"{count} of {patience} iterations in a row after which the run stops"
            if count >= patience:
                self._verdict = (
                    f"Stopped after iteration {iteration}: {found}, for {count} iterations in a row. Continue from the last "
                    f"checkpoint with other settings: {check.advice}."
                )
        logger.warning("iteration %d: %s; %s. %s", iteration, found, upshot, check.advice.capitalize())

    def get_state(self) -> dict[str, Any]:
        """State for a resumed run."""
        names = {"armed": self._armed, "well": self._well, "sudden": self._sudden}
        return {**{key: sorted(each) for key, each in names.items()}, "in_a_row": dict(self._in_a_row)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`get_state` was taken; the verdict follows from the present settings."""
        self._armed = set(state["armed"])
        self._in_a_row: dict[str, int] = dict(state["in_a_row"])
        """Iterations in a row in which each check was violated, up to the last one."""
        # Checkpoints of earlier versions lack these two.
        self._well = set(state.get("well", ()))
        """HealthChecks against a collapse whose value would have armed them in the last iteration."""
        self._sudden = set(state.get("sudden", ()))
        """Those that were violated in the iteration after such a one, and since then."""
        self._verdict = ""

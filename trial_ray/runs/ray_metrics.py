"""Main metrics of a run as Ray metrics, which Ray's nodes export for Prometheus (``cluster/grafana.json`` plots them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trial_ray.metrics import (
    EFFECTIVE_SAMPLE_SIZE,
    ENV_RUNNERS,
    EVALUATION_SUCCESS,
    LEARNER,
    TRAINING_SUCCESS,
)

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

GAUGES = {
    "trial_iteration": "training_iteration",
    "trial_iteration_seconds": "time_this_iter_s",
    "trial_sampling_seconds": "seconds/sampling",
    "trial_update_seconds": "seconds/update",
    "trial_sync_seconds": "seconds/sync",
    "trial_evaluation_seconds": "seconds/evaluation",
    "trial_success_rate": TRAINING_SUCCESS,
    "trial_evaluation_success_rate": EVALUATION_SUCCESS,
    "trial_staleness": f"{LEARNER}rows/staleness_mean",
    "trial_effective_sample_size": EFFECTIVE_SAMPLE_SIZE,
    "trial_logprob_diff": f"{LEARNER}engine/logprob_diff",
    "trial_kl": f"{LEARNER}grpo/kl",
    "trial_entropy": f"{LEARNER}grpo/entropy",
    "trial_health_checks_failed": "health_checks/num_failed",
}
"""Metrics of the newest iteration, by their names in Ray."""
COUNTERS = {
    "trial_turns": f"{ENV_RUNNERS}num_env_steps_sampled",
    "trial_episodes": f"{ENV_RUNNERS}num_episodes",
    "trial_failed_episodes": f"{ENV_RUNNERS}num_failed_episodes",
    "trial_prompt_tokens": f"{ENV_RUNNERS}num_prompt_tokens",
    "trial_response_tokens": f"{ENV_RUNNERS}num_response_tokens",
    "trial_trained_tokens": f"{LEARNER}update/tokens_trained",
    "trial_trained_groups": "groups/num_trained",
    "trial_dropped_groups": "groups/num_dropped",
    "trial_lost_groups": f"{LEARNER}rows/lost_groups",
}
"""Metrics that are summed over iterations, by their names in Ray."""
TAGS = ("run", "group")


class RayTracker:
    """Logs to Ray's own metrics, one of the services of :mod:`trial_ray.runs.trackers`.

    Args:
        run: name of the run, a tag of every metric.
        group: name of its sweep, a tag of every metric.
    """

    def __init__(self, run: str, group: str | None = None) -> None:
        self._tags = {"run": run, "group": group or ""}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges and increment the counters; Ray exports them within some seconds."""
        from ray.util.metrics import Counter, Gauge

        # Create metrics on first use: trackers are built before ray.init().
        for name, key in GAUGES.items():
            if key in metrics:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, key, TAGS).set_default_tags(self._tags)
                self._gauges[name].set(metrics[key])
        for name, key in COUNTERS.items():
            if (count := metrics.get(key, 0)) > 0:
                if name not in self._counters:
                    self._counters[name] = Counter(name, key, TAGS).set_default_tags(self._tags)
                self._counters[name].inc(count)

    def close(self, state: str) -> None:
        """Do nothing, because no state is kept."""

"""Metrics of a run that Ray exports for Prometheus, and the dashboard that plots them."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from trial_ray.errors import ConfigError
from trial_ray.metrics import METRICS
from trial_ray.runs.trackers import COUNTERS, GAUGES, RayTracker, TrackedRun, require_trackers

EXPORTED = GAUGES | COUNTERS
DASHBOARD = Path(__file__).parents[2] / "cluster/grafana.json"


def test_the_dashboard_plots_the_exported_metrics():
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    # Ray adds a prefix to the names, and the Prometheus client a suffix to those of counters.
    exported = {f"ray_{name}" for name in GAUGES} | {f"ray_{name}_total" for name in COUNTERS}
    assert set(re.findall(r"\bray_\w+", " ".join(expressions))) == exported
    assert {*EXPORTED.values()} <= METRICS.keys()


def test_gauges_are_set_and_counters_are_incremented(monkeypatch):
    seen = Counter()

    class Metric:
        def __init__(self, name, description, tag_keys):
            self.key = (name,)

        def set_default_tags(self, tags):
            self.key += (tags["run"],)
            return self

        def set(self, value):
            seen[self.key] = value

        def inc(self, value):
            seen[self.key] += value

    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(f"ray.util.metrics.{kind}", type(kind, (Metric,), {}))
    iteration = dict.fromkeys(EXPORTED.values(), 3.0)
    for run in ("first", "second"):
        tracker = RayTracker(TrackedRun(run, run, {}, Path(), "sweep"))
        tracker.log(1, iteration)
        tracker.log(2, {**iteration, "training_iteration": 7.0, "groups/num_dropped": 0.0})
    assert seen.keys() == {(name, run) for name in EXPORTED for run in ("first", "second")}
    assert seen["trial_iteration", "second"] == 7.0
    assert seen["trial_turns", "first"] == 6.0
    assert seen["trial_dropped_groups", "first"] == 3.0


def test_ray_metrics_require_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError):
        require_trackers(["ray"])
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    require_trackers(["ray"])

"""What a run tells Prometheus through Ray, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from trial_ray.metrics import METRICS
from trial_ray.runs.ray_metrics import COUNTERS, GAUGES, TAGS, prometheus_names
from trial_ray.runs.trackers import TrackedRun, Trackers

DASHBOARD = Path(__file__).parents[2] / "cluster" / "grafana.json"
EXPORT_S = 60.0


def test_every_figure_is_a_metric_of_the_table_of_the_kind_that_is_summed_or_shown():
    assert {*GAUGES.values(), *COUNTERS.values()} <= METRICS.keys()
    assert {METRICS[key].kind for key in COUNTERS.values()} <= {"sum", "item"}


def test_the_dashboard_draws_what_is_exported_and_nothing_else():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    asked = {name for text in (*expressions, *queries) for name in re.findall(r"\bray_\w+", text)}
    assert asked == prometheus_names()
    labels = {label for text in expressions for label in re.findall(r"[{,]\s*(\w+)\s*=", text)}
    labels |= {label for text in expressions for label in re.findall(r"by \((\w+)\)", text)}
    assert labels <= set(TAGS)
    # A counter is of use as a rate, a gauge as it is.
    assert all(("_total" in each) == ("rate(" in each) for each in expressions)


@pytest.mark.actors
def test_ray_exports_the_figures_of_two_runs_by_their_names(ray_session, tmp_path):
    warnings: list[str] = []
    iteration = dict.fromkeys((*GAUGES.values(), *COUNTERS.values()), 3.0)
    for name in ("first", "second"):
        run = TrackedRun(name, name, {}, tmp_path, group="sweep")
        with Trackers(["ray"], run, warnings.append) as trackers:
            trackers.log(1, iteration)
            trackers.log(2, {**iteration, "training_iteration": 7.0, "groups/num_dropped": 0.0})
    deadline, wanted = (
        time.monotonic() + EXPORT_S,
        {(name, run) for name in prometheus_names() for run in ("first", "second")},
    )
    found: dict[tuple[str, str], float] = {}
    while time.monotonic() < deadline and not wanted <= found.keys():
        found = exported()
        time.sleep(1)
    assert not warnings
    assert not wanted - found.keys()
    assert found["ray_trial_iteration", "second"] == 7.0
    assert found["ray_trial_turns_total", "first"] == 6.0
    assert found["ray_trial_dropped_groups_total", "first"] == 3.0


def exported() -> dict[tuple[str, str], float]:
    """Values of this package's metrics at the node, by name and run."""
    [node] = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    lines = re.findall(r'^(ray_trial_\w+)\{.*?run="(\w+)".*?\} (\S+)$', text, re.MULTILINE)
    return {(name, run): float(value) for name, run, value in lines}

"""What a run tells Prometheus through Ray, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ray_nodes import cluster_of

from trial_ray.errors import ConfigError
from trial_ray.metrics import METRICS
from trial_ray.runs.ray_metrics import COUNTERS, GAUGES, TAGS, prometheus_names
from trial_ray.runs.trackers import require_trackers

DASHBOARD = Path(__file__).parents[2] / "cluster" / "grafana.json"


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


EXPORTED = """
import json, sys
from pathlib import Path
import ray
from trial_ray.runs.trackers import TrackedRun, Trackers

ray.init(log_to_driver=False)
iteration = json.loads(sys.argv[2])
for name in ("first", "second"):
    with Trackers(["ray"], TrackedRun(name, name, {}, Path(sys.argv[1]), group="sweep"), print) as trackers:
        trackers.log(1, iteration)
        trackers.log(2, {**iteration, "training_iteration": 7.0, "groups/num_dropped": 0.0})
[node] = ray.nodes()
print(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_ray_exports_the_figures_of_two_runs_by_their_names(tmp_path):
    iteration = dict.fromkeys((*GAUGES.values(), *COUNTERS.values()), 3.0)
    wanted = {(name, run) for name in prometheus_names() for run in ("first", "second")}
    found = {}
    with cluster_of() as nodes:
        nodes.wait_for_jobs()  # the process that exports metrics is there from now on
        with subprocess.Popen(
            [sys.executable, "-c", EXPORTED, str(tmp_path), json.dumps(iteration)],
            env=nodes.environment | {"RAY_ADDRESS": nodes.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as logging:
            address = logging.stdout.readline().strip()
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not wanted <= found.keys():
                found = exported(address)
                time.sleep(1)
            logging.stdin.close()
            assert not logging.stdout.read()  # a warning
    assert not wanted - found.keys()
    assert found["ray_trial_iteration", "second"] == 7.0
    assert found["ray_trial_turns_total", "first"] == 6.0
    assert found["ray_trial_dropped_groups_total", "first"] == 3.0


def exported(address: str) -> dict[tuple[str, str], float]:
    """Values of this package's metrics at the node, by name and run."""
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    lines = re.findall(r'^(ray_trial_\w+)\{.*?run="(\w+)".*?\} (\S+)$', text, re.MULTILINE)
    return {(name, run): float(value) for name, run, value in lines}


def test_without_a_cluster_there_is_nothing_that_exports_them(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="expected a Ray cluster"):
        require_trackers(["ray"])
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    require_trackers(["ray"])

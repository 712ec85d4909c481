"""Metrics of a run that Ray exports for Prometheus, and the dashboard that plots them."""

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
from trial_ray.runs.trackers import COUNTERS, GAUGES, require_trackers

PROMETHEUS = {f"ray_{name}" for name in GAUGES} | {f"ray_{name}_total" for name in COUNTERS}
"""Names in Prometheus: Ray adds a prefix, and the Prometheus client a suffix to counters."""
DASHBOARD = Path(__file__).parents[2] / "cluster" / "grafana.json"


def test_the_dashboard_plots_the_exported_metrics():
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"\bray_\w+", " ".join(expressions))) == PROMETHEUS
    # A counter is plotted as a rate, a gauge as it is.
    assert all(("_total" in expression) == ("rate(" in expression) for expression in expressions)
    assert {*GAUGES.values(), *COUNTERS.values()} <= METRICS.keys()
    assert {METRICS[key].kind for key in COUNTERS.values()} <= {"sum", "item"}


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
def test_ray_exports_the_metrics_of_two_runs(tmp_path):
    iteration = dict.fromkeys((*GAUGES.values(), *COUNTERS.values()), 3.0)
    expected = {(name, run) for name in PROMETHEUS for run in ("first", "second")}
    values = {}
    with cluster_of() as nodes:
        nodes.wait_for_jobs()  # the process that exports metrics has started
        with subprocess.Popen(
            [sys.executable, "-c", EXPORTED, str(tmp_path), json.dumps(iteration)],
            env=nodes.environment | {"RAY_ADDRESS": nodes.address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as logging:
            address = logging.stdout.readline().strip()
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not expected <= values.keys():
                values = exported(address)
                time.sleep(1)
            logging.stdin.close()
            assert not logging.stdout.read()  # no warning was printed
    assert not expected - values.keys()
    assert values["ray_trial_iteration", "second"] == 7.0
    assert values["ray_trial_turns_total", "first"] == 6.0
    assert values["ray_trial_dropped_groups_total", "first"] == 3.0


def exported(address: str) -> dict[tuple[str, str], float]:
    """Return the values of this package's metrics at the node, by name and run."""
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    lines = re.findall(r'^(ray_trial_\w+)\{.*?run="(\w+)".*?\} (\S+)$', text, re.MULTILINE)
    return {(name, run): float(value) for name, run, value in lines}


def test_ray_metrics_require_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError):
        require_trackers(["ray"])
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    require_trackers(["ray"])

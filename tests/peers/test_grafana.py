"""The Grafana dashboard: Grafana's own types have every field of it, and a Prometheus that reads a run answers its queries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes, as_options, cluster_of, free_ports

from trial_ray.runs.ray_metrics import COUNTERS, GAUGES, prometheus_names

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "cluster" / "grafana.json").read_text(encoding="utf-8"))
PROMETHEUS = shutil.which("prometheus")
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
SETTINGS = {
    "engine": "transformers",
    "evaluation_num_tasks": 4,
    "evaluation_interval": 1,
    "env_config": {"split": "generated", "num_games": 16, "difficulty": "tiny", "max_turns": 4},
    "tasks_per_iteration": 2,
    "group_size": 2,
    "hindsight_start_iteration": 1,
}


def test_grafanas_types_have_every_field_of_the_dashboard():
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    read = models.Dashboard.from_json(DASHBOARD)
    written = json.loads(encoder.JSONEncoder().encode(read))
    assert lost(DASHBOARD, written) == []
    misspelled = json.loads(json.dumps(DASHBOARD).replace('"gridPos"', '"gridpos"'))
    again = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(misspelled)))
    assert lost(misspelled, again)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Paths of what is in ``before`` and not in ``after``, or is another value there."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key in before for each in lost(before[key], after.get(key, "is missing"), f"{path}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [each for i, pair in enumerate(zip(before, after, strict=True)) for each in lost(*pair, f"{path}/{i}")]
    return [] if before == after else [f"{path}: {before!r}, {after!r}"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster_of() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prometheus(nodes, tmp_path_factory) -> Iterator[str]:
    """Address of a Prometheus that finds the cluster's nodes as docs/cluster.md says."""
    folder = tmp_path_factory.mktemp("prometheus")
    found = {
        "url": f"{nodes.environment['RAY_API_SERVER_ADDRESS']}/api/prometheus/sd",
        "authorization": {"type": "Bearer", "credentials": nodes.environment["RAY_AUTH_TOKEN"]},
        "refresh_interval": "2s",
    }
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "ray", "http_sd_configs": [found]}]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    (port,) = free_ports(1)
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROMETHEUS), *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=60)


def ask(address: str, path: str, **query: object) -> Any:
    """The data of an answer of Prometheus' API."""
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus on the path (Debian's package of that name)")
def test_prometheus_answers_every_query_of_every_panel(nodes, prometheus, tmp_path):
    run, began = tmp_path / "my-run", time.time()
    words = ["train", EXPERIMENT, "--out", str(run), "--iterations", "40", "--log-to", "ray"]
    done = subprocess.run(
        ["trial-ray", *words, *as_options(SETTINGS)],
        cwd=ROOT, env={**nodes.environment, "RAY_ADDRESS": nodes.address}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {f"ray_{name}" for name, key in GAUGES.items() if any(key in line for line in lines)}
    logged |= {f"ray_{name}_total" for name, key in COUNTERS.items() if sum(line.get(key, 0) for line in lines) > 0}
    # Nothing failed, and every group was trained.
    never = {"ray_trial_failed_episodes_total", "ray_trial_lost_groups_total", "ray_trial_dropped_groups_total"}
    assert prometheus_names() - logged == never

    [names] = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", names).groups()
    assert ask(prometheus, f"label/{label}/values", **{"match[]": metric}) == ["my-run"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            # As Grafana does it for a chosen run.
            expression = target["expr"].replace("$run", "my-run")
            found = ask(prometheus, "query_range", query=expression, start=began, end=time.time(), step="1s")["result"]
            [name] = re.findall(r"ray_trial_\w+", expression)
            assert bool(found) == (name in logged), (panel["title"], expression)
            assert all(series["metric"]["run"] == "my-run" for series in found)

"""Runs side by side on one cluster: each as it would be alone, whatever happens to the others; what `status` and `logs` tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_nodes import RayNodes, as_options, cluster_of
from safetensors.torch import load_file

from trial_ray.cli import main
from trial_ray.runs.checkpoints import find_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
ITERATIONS = 8
WAIT_S = 400.0
TIMES = ("time", "seconds", "timestamp", "date", "memory", "pid", "iterations_since_restore")
"""Parts of the names of metrics that measure the machine, or name the process."""
SETTINGS = {
    "engine": "transformers",
    "engine_kwargs": {"max_batch": 1, "num_threads": 1},
    "seeded_sampling": True,
    "evaluation_split": None,
    "env_config": {"split": "generated", "num_games": 16, "difficulty": "tiny", "max_turns": 4},
    "tasks_per_iteration": 2,
    "group_size": 4,
    "hindsight_start_iteration": 1,
    "num_learners": 1,
    **dict.fromkeys(("num_cpus_per_env_runner", "num_cpus_per_engine", "num_cpus_per_learner"), 0.05),
    # Each run is on both nodes.
    "custom_resources_per_env_runner": {"head": 0.1},
    "custom_resources_per_engine": {"worker": 0.1},
    "custom_resources_per_learner": {"worker": 0.1},
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster_of("worker") as cluster:
        yield cluster


@pytest.fixture
def dashboard(nodes, monkeypatch) -> str:
    """Its address; this process has the token."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, nodes.environment[name])
    return nodes.environment["RAY_API_SERVER_ADDRESS"]


@pytest.fixture
def start(nodes) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a run of a seed in a folder; it prints into ``<folder>.log``."""
    started = []

    def start(folder: Path, seed: int, iterations: int = ITERATIONS, **changes: Any) -> subprocess.Popen[bytes]:
        words = ["train", EXPERIMENT, "--out", str(folder), "--seed", str(seed), "--iterations", str(iterations)]
        with folder.with_name(f"{folder.name}-{len(started)}.log").open("wb") as log:
            command = subprocess.Popen(
                ["trial-ray", *words, *as_options({**SETTINGS, **changes})],
                cwd=ROOT,
                env={**nodes.environment, "RAY_ADDRESS": nodes.address},
                stdout=log,
                stderr=log,
            )
        started.append(command)
        return command

    yield start
    for command in started:
        command.kill()
        command.wait()


def status(capsys, address: str) -> dict[str, dict[str, Any]]:
    """What the command tells, by name of run."""
    capsys.readouterr()
    assert main(["status", address, "--json"]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)}


def wait_for(condition: Callable[[], Any], *commands: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert all(command.poll() is None for command in commands), "a run ended"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Metrics of every iteration, without what measures the machine, and the weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in lines]
    return kept, load_file(find_model(folder) / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    (metrics, weights), (other_metrics, other_weights) = outcome(one), outcome(other)
    assert len(metrics) == ITERATIONS
    assert metrics == other_metrics
    assert weights.keys() == other_weights.keys()
    assert all(weights[name].equal(other_weights[name]) for name in weights)


def test_runs_side_by_side(nodes, start, dashboard, capsys, tmp_path):
    alone = {seed: tmp_path / f"alone-{seed}" for seed in (1, 2)}
    for seed, folder in alone.items():
        assert start(folder, seed).wait(timeout=WAIT_S) == 0, (tmp_path / f"alone-{seed}-{seed - 1}.log").read_text()

    beside = {seed: tmp_path / f"beside-{seed}" for seed in (1, 2)}
    commands = [start(folder, seed) for seed, folder in beside.items()]
    killed, same = tmp_path / "[killed]\x1b ü", tmp_path / "same"
    doomed = start(killed, 3, iterations=10_000)
    names = {folder.name for folder in (*beside.values(), killed)}
    told: dict[str, dict[str, Any]] = {}

    def all_trained() -> bool:
        for name, run in status(capsys, dashboard).items():
            if run["state"] == "running" and run["done"]:
                told.setdefault(name, run)
        return names <= told.keys()

    wait_for(all_trained, doomed)
    pids = set()
    for run in (told[name] for name in names):
        assert {actor["name"] for actor in run["actors"]} == {"env runner 1", "engine 0", "learner 0"}
        assert all(actor["state"] == "ALIVE" for actor in run["actors"])
        pids |= {actor["pid"] for actor in run["actors"]}
        assert run["metrics"]["learners/default_policy/total_loss"] is not None
        assert run["seconds"] > 0
    assert len(pids) == 9
    assert told["beside-1"]["total"] == ITERATIONS

    doomed.send_signal(signal.SIGKILL)
    rivals = [start(same, 4, iterations=1) for _ in range(2)]
    ended = wait_for(lambda: (found := status(capsys, dashboard)[killed.name])["state"] == "ended" and found)
    assert ended["actors"] == []
    assert all(status(capsys, dashboard)[folder.name]["state"] == "done" for folder in alone.values())
    assert [command.wait(timeout=WAIT_S) for command in commands] == [0, 0]
    for seed in (1, 2):
        assert_same(alone[seed], beside[seed])
    # Of two runs in one folder the second is refused.
    assert sorted(command.wait(timeout=WAIT_S) for command in rivals) == [0, 2]
    assert any("not empty" in log.read_text() or "in use" in log.read_text() for log in tmp_path.glob("same-*.log"))

    assert main(["status", dashboard]) == 0
    table = capsys.readouterr().out
    assert "\x1b" not in table
    assert "[killed]␛ ü" in table
    assert f"{ITERATIONS} of {ITERATIONS} iterations" in table


def test_logs_of_all_nodes_come_into_one_folder(nodes, start, dashboard, capsys, tmp_path):
    run = tmp_path / "logged"
    command = start(run, 1, iterations=10_000, max_restarts=0)
    wait_for(lambda: status(capsys, dashboard).get("logged", {}).get("done"), command)
    assert main(["logs", "logged", dashboard, "--out", str(tmp_path / "fetched")]) == 0
    for actor in ("engine-0-", "learner-0-", "env-runner-1-"):
        assert any((tmp_path / "fetched").glob(f"{actor}*"))

    # A run that fails brings the logs by itself.
    [learner] = [actor for actor in status(capsys, dashboard)["logged"]["actors"] if actor["name"] == "learner 0"]
    os.kill(learner["pid"], signal.SIGKILL)
    assert command.wait(timeout=WAIT_S) == 1
    failed = status(capsys, dashboard)["logged"]
    assert (failed["state"], failed["actors"]) == ("failed", [])
    assert "learner 0 died" in failed["error"]
    for actor in ("engine-0-", "learner-0-", "env-runner-1-"):
        assert any((run / "logs" / "actors").glob(f"{actor}*"))

    nodes.kill("worker")

    def the_node_is_told() -> bool:
        """Ray takes a while to notice."""
        assert main(["logs", str(run), dashboard]) == 0
        return "is gone, and its logs with it" in capsys.readouterr().err

    wait_for(the_node_is_told)
    assert main(["logs", "nothing", dashboard]) == 2
    assert "logged" in capsys.readouterr().err

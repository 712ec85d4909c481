"""A node that is lost with the learner and the env runner on it: the run goes on by itself when there is room again."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from fault_table import lost_rows
from ray_nodes import RayNodes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
ITERATIONS = 12
WAIT_S = 300.0
SETTINGS = {
    "warm_start": None,
    "engine": "transformers",
    "evaluation_split": None,
    "tasks_per_iteration": 2,
    "group_size": 2,
    "num_learners": 1,
    "num_cpus_per_env_runner": 0.2,
    "num_cpus_per_engine": 0.2,
    "num_cpus_per_learner": 0.2,
    "num_cpus_for_main_process": 0.2,
    "custom_resources_per_engine": {"head": 0.1},
    "custom_resources_per_env_runner": {"worker": 0.1},
    "custom_resources_per_learner": {"worker": 0.1},
}


def iterations(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["iteration"] for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("how", ["lost", "hangs"])
def test_the_node_of_learner_and_env_runner(model_path, tmp_path, tell, how):
    run = tmp_path / "run"
    settings = {**SETTINGS, "model_path": model_path}
    words = [
        "trial-ray", "train", "tuned_examples/alfworld_quickstart.py", "--out", str(run), "--iterations", str(ITERATIONS),
        "--checkpoint-every", "1", *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(Path(folder))
        try:
            nodes.start_head("head")
            nodes.wait_for_nodes()
            nodes.start_worker("worker")
            nodes.wait_for_nodes()
            with (tmp_path / "log").open("w") as output:
                command = subprocess.Popen(
                    words,
                    cwd=ROOT,
                    env={**nodes.environment, "RAY_ADDRESS": nodes.address},
                    stdout=output,
                    stderr=output,
                )
            try:
                seconds = _lose_the_worker(nodes, command, run, how)
                code = command.wait(timeout=WAIT_S)
            finally:
                command.kill()
                command.wait(timeout=30)
                said = (tmp_path / "log").read_text()
                print(said)
        finally:
            nodes.stop()
    assert code == 0, said
    assert "restart 1 of at most 3" in said
    assert iterations(run) == list(range(1, ITERATIONS + 1))
    assert json.loads((run / "run.json").read_text())["state"] == "done"
    lost = sum(lost_rows(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines())
    tell(f"the node of learner and env runner {how}", "after iteration 2", "restart on a new node", seconds, lost)


def _lose_the_worker(nodes: RayNodes, command: subprocess.Popen[bytes], run: Path, how: str) -> float:
    """Kill or stop the node after two iterations and start another one; returns the seconds to the end of the run."""
    _wait_for(2, run, command)
    began = time.monotonic()
    {"lost": nodes.kill, "hangs": nodes.suspend}[how]("worker")
    nodes.start_worker("worker")
    _wait_for(ITERATIONS, run, command)
    return time.monotonic() - began


def _wait_for(iteration: int, run: Path, command: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while iteration not in iterations(run):
        assert command.poll() is None, "the command ended"
        assert time.monotonic() < deadline, f"iteration {iteration} never came"
        time.sleep(0.05)

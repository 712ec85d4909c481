"""Nodes that are lost or hang: a run goes on when there is room again."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_table import lost_rows
from ray_nodes import RayNodes, as_options, cluster_of

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
    with cluster_of("worker") as nodes:
        settings = {**SETTINGS, "model_path": model_path}
        lose = {"lost": nodes.kill, "hangs": nodes.suspend}[how]
        said, seconds, lost = _train_and_lose_the_worker(nodes, tmp_path, settings, lose, back=True)
    assert "restart 1 of at most 3" in said
    tell(f"the node of learner and env runner {how}", "after iteration 2", "restart on a new node", seconds, lost)


def test_the_node_of_one_of_two_learners_never_comes_back(model_path, tmp_path, tell):
    on_head = {"custom_resources_per_env_runner": {"head": 0.1}, "custom_resources_per_learner": {"learner": 1}}
    settings = {**SETTINGS, **on_head, "num_learners": 2, "resource_timeout_s": 20, "model_path": model_path}
    with cluster_of("worker", resources={"learner": 1}) as nodes:
        said, seconds, lost = _train_and_lose_the_worker(nodes, tmp_path, settings, nodes.kill, back=False)
    assert "Going on with 1 of 2 learners" in said
    assert "changed: num_learners is 1, it was 2" in said
    tell("the node of one of two learners", "after iteration 2", "restart with one learner", seconds, lost)


def _train_and_lose_the_worker(
    nodes: RayNodes, folder: Path, settings: dict[str, Any], lose: Callable[[str], None], back: bool
) -> tuple[str, float, int]:
    """Lose the worker node after two iterations; ``back``: and start another one.

    Returns:
        What the run printed, the seconds from the loss to its end, and rows that no iteration accounts for.
    """
    run = folder / "run"
    words = [
        "trial-ray", "train", "tuned_examples/alfworld_quickstart.py", "--out", str(run), "--iterations", str(ITERATIONS),
        "--checkpoint-every", "1", *as_options(settings),
    ]  # fmt: skip
    with (folder / "log").open("w") as output:
        environment = {**nodes.environment, "RAY_ADDRESS": nodes.address}
        command = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            _wait_for(2, run, command)
            began = time.monotonic()
            lose("worker")
            if back:
                nodes.start_worker("worker")
            _wait_for(ITERATIONS, run, command)
            seconds = time.monotonic() - began
            code = command.wait(timeout=WAIT_S)
        finally:
            command.kill()
            command.wait(timeout=30)
            said = (folder / "log").read_text()
            print(said)
    assert code == 0, said
    assert iterations(run) == list(range(1, ITERATIONS + 1))
    assert json.loads((run / "run.json").read_text())["state"] == "done"
    lost = sum(lost_rows(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines())
    return said, seconds, lost


def _wait_for(iteration: int, run: Path, command: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while iteration not in iterations(run):
        assert command.poll() is None, "the command ended"
        assert time.monotonic() < deadline, f"iteration {iteration} never came"
        time.sleep(0.05)

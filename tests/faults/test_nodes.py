"""Nodes of learners that are lost: a run goes on when there is room again, or with the learners that there is room for."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from fault_checks import lost_rows
from ray_nodes import ClusterRun, cluster_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]
ITERATIONS = 8
SETTINGS = {
    "warm_start": None,
    "engine": "transformers",
    "evaluation_split": None,
    "tasks_per_iteration": 2,
    "group_size": 2,
    "custom_resources_per_engine": {"head": 0.1},
}


def lose_the_worker(nodes, folder, settings, back: bool) -> str:
    """Lose the worker node after two iterations, and where it comes back start another one; returns what the run printed."""
    with closing(ClusterRun(nodes, folder, {**SETTINGS, **settings}, ITERATIONS, "--checkpoint-every", "1")) as run:
        run.wait_for(lambda found: len(found) >= 2)
        nodes.kill("worker")
        if back:
            nodes.start_worker("worker")
        assert run.end() == 0, run.printed
    lines = run.iterations()
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert sum(map(lost_rows, lines)) == 0
    assert json.loads((folder / "run.json").read_text())["state"] == "done"
    return run.printed


def test_the_node_of_learner_and_env_runner_comes_back(model_path, tmp_path):
    on_worker = {"custom_resources_per_env_runner": {"worker": 0.1}, "custom_resources_per_learner": {"worker": 0.1}}
    settings = {"model_path": model_path, "num_learners": 1, **on_worker}
    with cluster_of("worker") as nodes:
        assert "restart 1 of at most 3" in lose_the_worker(nodes, tmp_path / "run", settings, back=True)


def test_the_node_of_one_of_two_learners_never_comes_back(model_path, tmp_path):
    settings = {"custom_resources_per_env_runner": {"head": 0.1}, "custom_resources_per_learner": {"learner": 1}}
    settings |= {"num_learners": 2, "resource_timeout_s": 10, "model_path": model_path}
    with cluster_of("worker", resources={"learner": 1}) as nodes:
        said = lose_the_worker(nodes, tmp_path / "run", settings, back=False)
    assert "Continuing with 1 of 2 learners" in said
    assert "changed: num_learners is 1, it was 2" in said

"""Nodes are taken away and given back while a run trains: it goes on with what there is, and ends as if nothing had happened.

Four Ray nodes have room for one engine and one env runner each. A run begins with one of each and takes the others in; one node is
drained, one killed during sampling, three join. Engines decode one request at a time and requests have seeds, so a run of fixed
size ends with the same weights.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from fault_checks import lost_rows
from ray_nodes import ClusterRun, cluster_of
from safetensors.torch import load_file

from trial_ray.runs.checkpoints import find_model

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600)]
DRAIN_S, MOST = 120, 5
SETTINGS = {
    "engine": "transformers",
    "engine_kwargs": {"max_batch": 1, "num_threads": 1},
    "evaluation_split": None,
    "env_config.max_turns": 4,
    "tasks_per_iteration": 10,
    # Games so short are never won: without it nothing would be learned, and all weights would be equal.
    "entropy_coeff": 0.01,
    "group_size": 2,
    "hindsight_start_iteration": 1,
    "seeded_sampling": True,
    "custom_resources_per_engine": {"engine": 1},
    "custom_resources_per_env_runner": {"env_runner": 1},
}


def actors(metrics):
    return metrics["actors/num_engines"], metrics["actors/num_env_runners"]


def wait_for_actors(run, number):
    run.wait_for(lambda found: bool(found) and actors(found[-1]) == (number, number))
    target = len(run.iterations()) + 2
    run.wait_for(lambda found: len(found) >= target)


def test_two_of_four_nodes_leave_and_three_come(model_path, tmp_path):
    seats = {"engine": 1, "env_runner": 1}
    with cluster_of("one", "two", "three", resources=seats) as nodes, ExitStack() as stack:
        settings = {**SETTINGS, "model_path": model_path, "num_engines": (1, MOST), "num_env_runners": (1, MOST)}
        run = stack.enter_context(closing(ClusterRun(nodes, tmp_path / "elastic", settings, 100_000)))
        wait_for_actors(run, 4)
        nodes.drain("one", DRAIN_S)
        wait_for_actors(run, 3)
        nodes.wait_for_end("one", 900)
        time.sleep(0.1)  # into the sampling of the next
        nodes.kill("two")
        run.wait_for(lambda found: actors(found[-1]) == (2, 2))
        for name in ("four", "five", "six"):
            nodes.start_worker(name)
        wait_for_actors(run, MOST)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.printed
        found = run.iterations()
        settings |= {"num_engines": MOST, "num_env_runners": MOST}
        fixed = stack.enter_context(closing(ClusterRun(nodes, tmp_path / "fixed", settings, len(found))))
        assert fixed.end() == 0, fixed.printed
    first, last, expected = (
        load_file(Path(folder) / "model.safetensors")
        for folder in (model_path, find_model(run.folder), find_model(fixed.folder))
    )
    assert all(last[name].equal(each) for name, each in expected.items())
    assert any(not last[name].equal(each) for name, each in first.items()), "what never changes is always equal"
    assert [each["rows/sampled"] for each in found] == [each["rows/sampled"] for each in fixed.iterations()]
    assert all(each["groups/num_trained"] == 10 for each in found)
    assert actors(found[0]) == (1, 1)
    assert sum(map(lost_rows, found)) == 0

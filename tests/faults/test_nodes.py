"""Nodes are taken away and given back while a run trains: it goes on with what there is, and ends as if nothing had happened."""

import signal
import time
from contextlib import ExitStack, closing

import pytest
from cli_fakes import read
from fault_checks import lost_rows
from ray_nodes import ClusterRun, cluster_of
from safetensors.torch import load_file

from trial_ray.runs.checkpoints import find_model

pytestmark = pytest.mark.timeout(1800)
WORKERS = ("one", "two")
MOST = 1 + len(WORKERS)
LEARNER = "_WrappedExecutable"
"""Class of RLlib's learners in Ray's state API."""


@pytest.fixture(scope="module")
def cluster():
    with cluster_of(*WORKERS, engine=1, env_runner=1, learner=1) as cluster:
        yield cluster


@pytest.fixture
def nodes(cluster):
    """A head and two workers, whatever an earlier test did to them, with room for an engine, an env runner and a learner each."""
    for name in {*WORKERS} - {*cluster.workers}:
        cluster.start_worker(name)
    cluster.wait_for_nodes()
    return cluster


def settings_of(model_path, **changed):
    return {
        "model_path": model_path,
        "env_config.max_turns": 4,
        "tasks_per_iteration": 6,
        # Games so short are never won: without it nothing would be learned, and all weights would be equal.
        "entropy_coeff": 0.01,
        "group_size": 2,
        "custom_resources_per_engine": {"engine": 1},
        "custom_resources_per_env_runner": {"env_runner": 1},
        **changed,
    }


def actors(metrics):
    return metrics["actors/num_engines"], metrics["actors/num_env_runners"]


def wait_for_actors(run, number):
    run.wait_for(lambda found: bool(found) and actors(found[-1]) == (number, number))


def test_an_elastic_run_ends_as_one_of_fixed_size(nodes, model_path, tmp_path):
    """A run begins with one engine and one env runner; a node is drained, one killed during sampling, and two join."""
    with ExitStack() as stack:
        settings = settings_of(model_path, num_engines=(1, MOST), num_env_runners=(1, MOST))
        run = stack.enter_context(closing(ClusterRun(nodes, tmp_path / "elastic", settings, 100_000)))
        wait_for_actors(run, MOST)
        nodes.drain("one")
        wait_for_actors(run, MOST - 1)
        nodes.wait_for_end("one")
        time.sleep(0.1)  # into the sampling of the next
        nodes.kill("two")
        wait_for_actors(run, 1)
        for name in WORKERS:
            nodes.start_worker(name)
        wait_for_actors(run, MOST)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.printed
        found = run.iterations()
        settings |= {"num_engines": MOST, "num_env_runners": MOST}
        fixed = stack.enter_context(closing(ClusterRun(nodes, tmp_path / "fixed", settings, len(found))))
        assert fixed.end() == 0, fixed.printed
    first, last, expected = (
        load_file(f"{folder}/model.safetensors")
        for folder in (model_path, find_model(run.folder), find_model(fixed.folder))
    )
    assert all(last[name].equal(each) for name, each in expected.items())
    assert any(not last[name].equal(each) for name, each in first.items()), "what never changes is always equal"
    # A group that the killed node had just finished is played again, and its first rows are counted as redrawn.
    used = [each["rows/sampled"] - each["rows/redrawn"] for each in found]
    assert used == [each["rows/sampled"] for each in fixed.iterations()]
    assert all(each["groups/num_trained"] == 6 for each in found)
    assert actors(found[0]) == (1, 1)
    assert sum(map(lost_rows, found)) == 0


def test_a_run_goes_on_with_the_learners_that_there_are_nodes_for(nodes, model_path, tmp_path):
    """Two learners on three nodes: one that is lost has another place, the next has none."""
    settings = settings_of(
        model_path,
        num_learners=2,
        resource_timeout_s=10,
        custom_resources_per_learner={"learner": 1},
        custom_resources_per_engine={"head": 0.1},
        custom_resources_per_env_runner={"head": 0.1},
    )
    with closing(ClusterRun(nodes, tmp_path / "run", settings, 7, "--checkpoint-every", "1")) as run:
        for seen in (2, 4):
            run.wait_for(lambda found, seen=seen: len(found) >= seen)
            nodes.kill(next(name for name in nodes.workers if LEARNER in nodes.living_actors(name)))
        assert run.end() == 0, run.printed
    lines = run.iterations()
    assert [line["iteration"] for line in lines] == [*range(1, 8)]
    assert sum(map(lost_rows, lines)) == 0
    assert read(run.folder / "run.json")["state"] == "done"
    assert "restart 1 of at most 3" in run.printed
    assert "Continuing with 1 of 2 learners" in run.printed

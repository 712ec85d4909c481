"""Jobs that ``cluster/submit.sh`` sends to a cluster of three nodes with token authentication, one of which is lost on the way."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ray_nodes import ClusterRun, RayNodes, as_options, cluster_of

from trial_ray.cli import main

SUBMIT = str(Path(__file__).parents[2] / "cluster" / "submit.sh")
# Names of actors' classes in Ray's state API; RLlib wraps learners.
RUNNER, ENGINE, LEARNER = ("TextEnvRunner", "TransformersEngine", "_WrappedExecutable")
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
SETTINGS = {
    "warm_start": None,
    "engine": "transformers",
    "evaluation_split": None,
    "tasks_per_iteration": 2,
    "group_size": 2,
    "hindsight_start_iteration": 1,
    "num_learners": 1,
    # What one node each declares.
    "custom_resources_per_env_runner": {"head": 0.1},
    "custom_resources_per_engine": {"worker1": 0.1},
    "custom_resources_per_learner": {"worker2": 0.1},
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster_of("worker1", "worker2") as cluster:
        cluster.wait_for_jobs()
        yield cluster


def test_a_run_on_three_nodes_survives_the_loss_of_its_engines_node(nodes, model_path, tmp_path):
    settings = {**SETTINGS, "model_path": model_path}
    before = nodes.ids
    with closing(ClusterRun(nodes, tmp_path / "run", settings, 8, program=[SUBMIT, "--id", "three-nodes"])) as run:
        run.wait_for(bool)
        nodes.kill("worker1")
        nodes.start_worker("worker1")
        nodes.wait_for_nodes()
        assert run.end() == 0, run.printed
    # What the client saw: the run's own lines, as they were printed, then the end of the job.
    assert "iteration 8/8" in run.printed
    assert "'three-nodes' succeeded" in run.printed

    assert len({*before.values(), *nodes.ids.values()}) == 4
    assert where_actors_ran(nodes, RUNNER) == {nodes.ids["head"]}
    assert where_actors_ran(nodes, LEARNER) == {nodes.ids["worker2"]}
    assert where_actors_ran(nodes, ENGINE) == {before["worker1"], nodes.ids["worker1"]}

    exported = tmp_path / "exported"
    assert main(["export", str(run.folder), str(exported)]) == 0
    assert (exported / "model.safetensors").is_file()


def where_actors_ran(nodes: RayNodes, kind: str) -> set[str]:
    """Ids of the nodes on which, by Ray's state API, actors of a class ran."""
    return {actor["node_id"] for actor in nodes.actors() if kind in actor["class_name"]} - {None}


def test_a_failed_run_fails_the_submission(nodes, tmp_path):
    words = [SUBMIT, "train", EXPERIMENT, "--out", str(tmp_path / "run"), "--set", "no_such_setting=1"]
    done = subprocess.run(words, env=nodes.environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "no_such_setting" in done.stdout + done.stderr


def test_a_command_without_the_token_is_turned_away(nodes, model_path, tmp_path):
    environment = {**nodes.environment, "RAY_ADDRESS": nodes.address, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    words = ["trial-ray", "train", EXPERIMENT, "--out", str(tmp_path / "run")]
    words += as_options({**SETTINGS, "model_path": model_path})
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "rejects the token" in done.stderr
    assert not (tmp_path / "run").exists()

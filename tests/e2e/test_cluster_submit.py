"""Jobs that ``cluster/submit.sh`` sends to a cluster of three nodes with token authentication, one of which is lost on the way."""

from __future__ import annotations

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import RayNodes, as_options, cluster_of

from trial_ray.cli import main

ROOT = Path(__file__).parents[2]
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
SWEEP = "tuned_examples/sweeps/lambda_alpha.py"
# Names of actors' classes in Ray's state API; RLlib wraps learners.
RUNNER, ENGINE, LEARNER = ("TextEnvRunner", "TransformersEngine", "_WrappedExecutable")
JOB_S = 600.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with cluster_of("worker1", "worker2") as cluster:
        cluster.wait_for_jobs()
        yield cluster


@pytest.fixture(scope="module")
def settings(model_path: str) -> list[str]:
    """A tiny run whose env runner, engine and learner ask for what one node each declares."""
    chosen = {
        "warm_start": None,
        "model_path": model_path,
        "engine": "transformers",
        "evaluation_split": None,
        "tasks_per_iteration": 2,
        "group_size": 2,
        "hindsight_start_iteration": 1,
        "num_learners": 1,
        "custom_resources_per_env_runner": {"head": 0.1},
        "custom_resources_per_engine": {"worker1": 0.1},
        "custom_resources_per_learner": {"worker2": 0.1},
    }
    return as_options(chosen)


def command(*arguments: str) -> list[str]:
    return [str(ROOT / "cluster" / "submit.sh"), *arguments]


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, timeout=JOB_S)


def test_a_run_on_three_nodes_survives_the_loss_of_its_engines_node(nodes, settings, tmp_path):
    run, log = tmp_path / "run", tmp_path / "job.log"
    words = ("train", EXPERIMENT, "--out", str(run), "--iterations", "8", *settings)
    with log.open("w") as output:
        job = subprocess.Popen(
            command("--id", "three-nodes", *words), env=nodes.environment, stdout=output, stderr=subprocess.STDOUT
        )
    wait_for_iterations(1, run, job, log)
    before = nodes.ids
    nodes.kill("worker1")
    nodes.start_worker("worker1")
    nodes.wait_for_nodes()
    assert job.wait(timeout=JOB_S) == 0, log.read_text()
    # What the client saw: the run's own lines, as they were printed, then the end of the job.
    followed = log.read_text()
    assert "iteration 8/8" in followed
    assert "'three-nodes' succeeded" in followed

    assert len({*before.values(), *nodes.ids.values()}) == 4
    assert where_actors_ran(nodes, RUNNER) == {nodes.ids["head"]}
    assert where_actors_ran(nodes, LEARNER) == {nodes.ids["worker2"]}
    assert where_actors_ran(nodes, ENGINE) == {before["worker1"], nodes.ids["worker1"]}

    exported = tmp_path / "exported"
    assert main(["export", str(run), str(exported)]) == 0
    assert (exported / "model.safetensors").is_file()


def where_actors_ran(nodes: RayNodes, kind: str) -> set[str]:
    """Ids of the nodes on which, by Ray's state API, actors of a class ran in the newest job that had any."""
    actors = [actor for actor in nodes.actors() if kind in actor["class_name"]]
    newest = max(actor["job_id"] for actor in actors)
    return {actor["node_id"] for actor in actors if actor["job_id"] == newest} - {None}


def wait_for_iterations(count: int, run: Path, job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a run has finished so many iterations."""
    deadline, metrics = time.monotonic() + JOB_S, run / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < count:
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_failed_run_fails_the_submission(nodes, tmp_path):
    words = ("train", EXPERIMENT, "--out", str(tmp_path / "run"), "--set", "no_such_setting=1")
    done = submit(nodes.environment, *words)
    assert done.returncode == 1
    assert "no_such_setting" in done.stdout + done.stderr


def test_a_client_without_the_token_is_turned_away(nodes, tmp_path):
    words = ("train", EXPERIMENT, "--out", str(tmp_path / "run"))
    done = submit({**nodes.environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}, *words)
    assert done.returncode == 2
    assert "refuses the token" in done.stderr


def test_a_command_without_the_token_is_turned_away(nodes, settings, tmp_path):
    environment = {**nodes.environment, "RAY_ADDRESS": nodes.address, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    done = subprocess.run(
        ["trial-ray", "train", EXPERIMENT, "--out", str(tmp_path / "run"), *settings],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=JOB_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "refuses the token" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_sweep_is_submitted_in_the_same_way(nodes, settings, tmp_path):
    # One of the file's two grids is left: two trials, which run one after the other.
    sweep = ("sweep", SWEEP, "--out", str(tmp_path / "sweep"), "--iterations", "1", "--set", "clamp_alpha=1.0")
    done = submit(nodes.environment, *sweep, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert [(trial["status"], trial["iterations"]) for trial in trials] == [("done", 1)] * len(trials)
    assert len(trials) > 1
    ran = [where_actors_ran(nodes, kind) for kind in (RUNNER, ENGINE, LEARNER)]
    assert ran == [{nodes.ids[name]} for name in ("head", "worker1", "worker2")]

"""Runs on a cluster of two nodes with token authentication: submitted, refused, and side by side."""

import secrets
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from commands import completed
from fault_checks import repeatable_metrics
from ray_nodes import ClusterRun, as_options, cluster_of

from trial_ray.cli import main
from trial_ray.runs.checkpoints import find_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]
SUBMIT = f"{Path(__file__).parents[2]}/cluster/submit.sh"
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"
SETTINGS = {
    "env_config": {"split": "generated", "num_games": 16, "difficulty": "tiny", "max_turns": 4},
    "tasks_per_iteration": 2,
    "group_size": 4,
    "num_learners": 1,
    **dict.fromkeys(("num_cpus_per_env_runner", "num_cpus_per_engine", "num_cpus_per_learner"), 0.05),
    # Each run is on both nodes.
    "custom_resources_per_env_runner": {"head": 0.1},
    "custom_resources_per_engine": {"worker": 0.1},
    "custom_resources_per_learner": {"worker": 0.1},
}


@pytest.fixture(scope="module")
def nodes():
    with cluster_of("worker") as cluster:
        cluster.wait_for_jobs()
        yield cluster


def outcome(run):
    """Metrics of every iteration, without what measures the machine, and the weights."""
    return repeatable_metrics(run.folder), (find_model(run.folder) / "model.safetensors").read_bytes()


def test_runs_side_by_side_end_as_they_do_alone(nodes, tmp_path):
    with ExitStack() as stack:

        def start(name, seed, iterations=4):
            run = ClusterRun(nodes, tmp_path / name, SETTINGS, iterations, "--seed", str(seed))
            return stack.enter_context(closing(run))

        alone = start("alone", 1)
        assert alone.end() == 0, alone.printed
        beside, killed = start("beside", 1), start("killed", 3, 10_000)
        killed.wait_for(bool)
        killed.process.send_signal(signal.SIGKILL)
        assert beside.end() == 0, beside.printed
    assert len(alone.iterations()) == 4
    assert outcome(alone) == outcome(beside)


def test_a_submitted_run_is_followed_to_its_end(nodes, tmp_path):
    with closing(ClusterRun(nodes, tmp_path / "run", SETTINGS, 2, program=[SUBMIT, "--id", "submitted"])) as run:
        assert run.end() == 0, run.printed
    # The client prints the lines of the run, then the end of the job.
    assert "iteration 2/2" in run.printed
    assert "'submitted' succeeded" in run.printed
    assert main(f"export {run.folder} {tmp_path}/exported".split()) == 0
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_a_failed_run_fails_the_submission(nodes, tmp_path):
    words = [SUBMIT, *f"train {EXPERIMENT} --out {tmp_path}/run --set no_such_setting=1".split()]
    done = completed(words, env=nodes.environment)
    assert done.returncode == 1
    assert "no_such_setting" in done.stdout + done.stderr


def test_a_command_without_the_token_is_turned_away(nodes, tmp_path):
    environment = {**nodes.environment, "RAY_ADDRESS": nodes.address, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    words = f"trial-ray train {EXPERIMENT} --out {tmp_path}/run".split() + as_options(SETTINGS)
    done = completed(words, env=environment)
    assert done.returncode == 2, done.stderr
    assert "rejects the token" in done.stderr
    assert not (tmp_path / "run").exists()

"""Remote learners that are killed or hang: the run goes on by itself from its last checkpoint, to the same weights."""

from __future__ import annotations

import json
import signal

import pytest
from faulty_env import CountingEnv
from faulty_run import FaultyRun, send, tiny_config
from user_env import registered

from trial_ray.algorithms.run_actors import LEARNER
from trial_ray.errors import LearnerError

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]
ITERATIONS = 3


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(CountingEnv):
        yield


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory) -> bytes:
    """Weights of a run without a fault."""
    run = FaultyRun(tmp_path_factory.mktemp("runs") / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    run.run()
    return run.weights()


def iterations(run: FaultyRun) -> list[int]:
    return [json.loads(line)["iteration"] for line in run.folder.metrics.read_text().splitlines()]


@pytest.mark.parametrize(
    ("phase", "iteration", "source"),
    [("update", 3, "checkpoints/000002"), ("sync", 2, "checkpoints/000001"), ("sampling", 1, "initial weights")],
)
def test_a_killed_learner_restarts_the_run_from_its_checkpoint(
    phase, iteration, source, uninterrupted, model_path, tmp_path
):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    with run.fault(phase, iteration, send(LEARNER, signal.SIGKILL)) as times:
        run.run()
    printed = run.printed.getvalue()
    print(printed, f"{phase}: recovered after {times['over'] - times['at']:.1f} s")
    assert len(run.algorithms) == 2
    assert "restart 1 of at most 3: " in printed
    assert source in printed
    assert "learner 0 died" in (run.folder.path / "logs" / "restart-1.log").read_text() or phase == "sync"
    assert iterations(run) == run.folder.recorded_iterations() == [1, 2, 3]
    assert run.folder.state() == "done"
    assert run.weights() == uninterrupted


def test_a_learner_that_hangs_is_ended_and_reported(uninterrupted, model_path, tmp_path):
    config = tiny_config(model_path, num_learners=2, stall_timeout_s=20.0)
    run = FaultyRun(tmp_path / "run", config, ITERATIONS)
    with run.fault("update", 2, send(LEARNER, signal.SIGSTOP, 1)) as times:
        run.run()
    print(run.printed.getvalue(), f"recovered after {times['over'] - times['at']:.1f} s")
    [report] = (run.folder.path / "logs").glob("stall-*.txt")
    text = report.read_text()
    print(text)
    assert "no progress for 20 s (update); ending learner 0, learner 1" in run.printed.getvalue()
    assert "waits for: learner, in the phase update" in text
    assert "stopped, does not answer" in text
    assert "all_reduce" in text.partition("--- learner 0\n")[2]
    assert "update_learners" in text.partition("--- driver")[2].partition("\n---")[0]
    assert run.weights() == uninterrupted


def test_a_run_gives_up_after_its_restarts(model_path, tmp_path):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=1, max_restarts=0), ITERATIONS)
    with run.fault("update", 1, send(LEARNER, signal.SIGKILL)), pytest.raises(LearnerError, match="learner 0 died"):
        run.run()
    assert run.folder.state() == "failed"

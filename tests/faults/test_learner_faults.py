"""Remote learners that are killed or hang: the run goes on by itself from its last checkpoint, to the same weights."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from faulty_env import CountingEnv
from faulty_run import FaultyRun, send, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import LEARNER
from trial_ray.errors import LearnerError

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(1800)]
ITERATIONS = 3


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(CountingEnv):
        yield


@pytest.fixture(scope="module")
def uninterrupted(model_path, tmp_path_factory) -> bytes:
    """Weights of a run without a fault."""
    run = FaultyRun(tmp_path_factory.mktemp("runs") / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    run.run_with()
    return run.weights()


def iterations(run: FaultyRun) -> list[int]:
    return [json.loads(line)["iteration"] for line in run.folder.metrics.read_text().splitlines()]


def test_a_killed_learner_restarts_the_run_from_its_checkpoint(uninterrupted, model_path, tmp_path, tell):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=2), ITERATIONS)
    kill = send(LEARNER, signal.SIGKILL)
    seconds = run.run_with((1, "sampling", 1, kill), (2, "update", 3, kill))
    printed = run.printed.getvalue()
    print(printed)
    assert len(run.algorithms) == 3
    assert "restart 1 of at most 3: learner 0 died in the update of iteration 1; going on from the initial" in printed
    assert "restart 2 of at most 3: learner 0 died in the update of iteration 3; going on from /" in printed
    # The second one was being written while its learner died, or was complete.
    assert re.search(rf"{run.folder.checkpoints}/00000[12]\b", printed.partition("restart 2")[2])
    logs = run.folder.path / "logs"
    assert all("ActorDiedError" in (logs / f"restart-{number}.log").read_text() for number in (1, 2))
    assert iterations(run) == run.folder.recorded_iterations() == [1, 2, 3]
    assert run.folder.state() == "done"
    assert run.weights() == uninterrupted
    for moment, each in zip(("sampling, no checkpoint yet", "update"), seconds, strict=True):
        tell("SIGKILL of one of two learners", moment, "restart; same weights", each, run.lost())


def test_a_learner_that_hangs_is_ended_and_reported(uninterrupted, model_path, tmp_path, tell):
    config = tiny_config(model_path, num_learners=2, stall_timeout_s=20.0)
    run = FaultyRun(tmp_path / "run", config, ITERATIONS)
    [seconds] = run.run_with((1, "update", 2, send(LEARNER, signal.SIGSTOP, 1)))
    print(run.printed.getvalue())
    [report] = (run.folder.path / "logs").glob("stall-*.txt")
    text = report.read_text()
    assert "no progress for 20 s (update); ending " in run.printed.getvalue()
    assert "stopped; it writes no stacks" in text.partition("--- learner 1:")[2]
    assert "in all_gather" in text.partition("--- learner 0:")[2]
    assert "update_learners" in text.partition("--- driver")[2].partition("\n---")[0]
    assert run.weights() == uninterrupted
    tell("SIGSTOP of one of two learners, stall_timeout_s=20", "update", "restart; same weights", seconds, run.lost())


def test_a_run_gives_up_after_its_restarts(model_path, tmp_path, tell):
    run = FaultyRun(tmp_path / "run", tiny_config(model_path, num_learners=1, max_restarts=0), ITERATIONS)
    killed: list[float] = []

    def kill(algorithm):
        killed.append(time.monotonic())
        send(LEARNER, signal.SIGKILL)(algorithm)

    with pytest.raises(LearnerError, match="learner 0 died"):
        run.run_with((1, "update", 1, kill))
    assert run.folder.state() == "failed"
    tell("SIGKILL of the learner, max_restarts=0", "update", "typed error", time.monotonic() - killed[0])

"""The watchdog kills actors of a run without progress, and then ends the run."""

from types import SimpleNamespace

import pytest
from commands import wait_until

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER
from trial_ray.process import Progress
from trial_ray.runs.watchdog import Watchdog


class FakeActor:
    def __init__(self, kind, index, killed):
        self.kind = kind
        self.count = 0
        self.killed = killed
        self.id = self.name = f"{kind} {index}"

    def progress(self):
        return Progress("node", 1000, 0.0, self.count)

    def kill(self, restart=False):
        self.killed.append((self.name, restart))
        self.count = 0


@pytest.fixture
def run():
    """Return a run without progress, of an env runner, an engine and two learners."""
    killed = []
    kinds = [(ENV_RUNNER, 1), (ENGINE, 0), (LEARNER, 0), (LEARNER, 1)]
    run = SimpleNamespace(killed=killed, printed=[], given_up=[], actors=[FakeActor(*kind, killed) for kind in kinds])
    run.algorithm = SimpleNamespace(actors=lambda: run.actors, phase="sampling")
    run.watchdog = Watchdog(run.algorithm, 0.2, run.printed.append, run.given_up.append)
    return run


@pytest.mark.parametrize("phase", ["sampling", "", "update", "sync"])
def test_actors_are_killed_once_and_then_the_run_ends(run, phase):
    run.algorithm.phase = phase
    with run.watchdog.watching():
        wait_until(lambda: run.given_up, within_s=30)
    ended = [actor.name for actor in run.actors if phase in ("update", "sync") or actor.kind != LEARNER]
    # Ray restarts env runners; the pool replaces engines, and the run learners.
    assert run.killed == [(name, name.startswith(ENV_RUNNER)) for name in ended]
    assert (phase or "between phases") in run.printed[0]
    assert ", ".join(ended) in run.printed[0]


def test_progress_of_any_process_is_enough(run, monkeypatch):
    """Advance the clock by less than the timeout whenever an actor makes progress."""
    actor = run.actors[3]
    progress = actor.progress

    def look():
        actor.count += 1
        return progress()

    monkeypatch.setattr("trial_ray.runs.watchdog.time", SimpleNamespace(monotonic=lambda: 0.19 * actor.count))
    monkeypatch.setattr(actor, "progress", look)
    with run.watchdog.watching():
        wait_until(lambda: actor.count > 20, within_s=30)
    assert not run.printed
    assert not run.killed

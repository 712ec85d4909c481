"""When the watchdog of a run acts, on whom, and what it writes."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER
from trial_ray.process_reports import Progress, describe_processes
from trial_ray.runs import watchdog
from trial_ray.runs.watchdog import Watchdog


class FakeActor:
    def __init__(self, kind, index, killed):
        self.kind, self.index, self.count, self.killed = kind, index, 0, killed
        self.id = self.name = f"{kind} {index}"

    def progress(self):
        return Progress("node", 1000, self.count, "turn")

    def kill(self, restart=False):
        self.killed.append((self.name, restart))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A run of one runner, two engines and two learners, of which nothing makes progress."""
    killed = []
    kinds = [(ENV_RUNNER, 1), (ENGINE, 0), (ENGINE, 1), (LEARNER, 0), (LEARNER, 1)]
    actors = [FakeActor(*each, killed) for each in kinds]
    run = SimpleNamespace(actors=actors, killed=killed, told=[], given_up=[], hung={}, silent=set(), phase="sampling")
    algorithm = SimpleNamespace(actors=lambda: actors)

    def examine(seen):
        algorithm.phase = run.phase
        for each in seen:
            each.answers, each.state = each.actor.name not in run.silent, run.hung.get(each.actor.name, "sleeping")
            each.stacks = f"stacks of {each.actor.name}"
        return describe_processes([os.getpid()])[os.getpid()]["stacks"]

    monkeypatch.setattr(watchdog, "_examine", examine)
    run.watchdog = Watchdog(algorithm, tmp_path / "logs", 0.2, run.told.append, run.given_up.append)
    run.reports = lambda: [path.read_text() for path in (tmp_path / "logs").glob("stall-*.txt")]
    return run


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("phase", "hung", "silent", "ended"),
    [
        ("sampling", {"engine 1": "stopped"}, {"env runner 1"}, ["engine 1"]),
        ("sampling", {}, {"env runner 1", "engine 0"}, ["engine 0"]),
        ("sampling", {}, {"env runner 1"}, ["env runner 1"]),
        ("", {"env runner 1": "stopped"}, set(), ["env runner 1"]),
        ("update", {"learner 1": "stopped", "engine 0": "stopped"}, set(), ["learner 0", "learner 1"]),
        ("sync", {}, {"engine 0"}, ["engine 0"]),
        ("sync", {}, set(), ["learner 0", "learner 1"]),
    ],
)
def test_what_hangs_is_ended(run, phase, hung, silent, ended):
    run.phase, run.hung, run.silent = phase, hung, silent
    with run.watchdog.watching():
        wait_for(lambda: len(run.killed) >= len(ended))
    # An env runner is restarted by Ray; the pool replaces engines, the run learners.
    assert run.killed[: len(ended)] == [(name, name.startswith(ENV_RUNNER)) for name in ended]
    assert f"no progress for 0.2 s ({phase or 'between phases'}); ending {', '.join(ended)}, so that" in run.told[0]
    report = run.reports()[0]
    assert all(f"--- {actor.name}\nstacks of {actor.name}" in report for actor in run.actors)
    assert "wait_for" in report
    for name, state in hung.items():
        assert f"{name}: process 1000 on node node, {state}" in report


def test_what_does_not_help_is_followed_by_more_and_then_by_the_end(run):
    with run.watchdog.watching():
        wait_for(lambda: run.given_up)
    names = [name for name, _ in run.killed]
    assert names[:6] == ["env runner 1", *(actor.name for actor in run.actors)]
    assert "nothing is left to end: stopping with exit code 1" in run.given_up[0]


def test_progress_of_any_process_is_enough(run):
    with run.watchdog.watching():
        ends = time.monotonic() + 1.0
        while time.monotonic() < ends:
            run.actors[3].count += 1
            time.sleep(0.01)
    assert not run.killed


def test_what_went_on_while_the_report_was_written_is_not_ended(run, monkeypatch):
    examine = watchdog._examine

    def examine_slowly(seen):
        run.actors[3].count += 1
        return examine(seen)

    monkeypatch.setattr(watchdog, "_examine", examine_slowly)
    with run.watchdog.watching():
        wait_for(lambda: len(run.told) >= 4)
    assert not run.killed
    assert not run.given_up
    assert run.told[1] == "the run went on meanwhile: nothing was ended"


def test_nothing_is_noticed_outside_of_what_is_watched(run):
    with run.watchdog.watching():
        pass
    time.sleep(0.5)
    assert not run.killed

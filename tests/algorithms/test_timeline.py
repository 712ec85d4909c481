"""The timeline of an iteration: events that processes keep, and the trace file."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import ray

from trial_ray.algorithms.actors import RunActor, Timeline, collect_timeline, write_timeline
from trial_ray.process import (
    EPISODE,
    ITERATION,
    MAX_EVENTS,
    RESPONSE,
    STEP,
    Event,
    ProcessEvents,
    event,
    note_event,
    process_events,
)

BEGAN = 1_000.0


def process(*events: Event, complete_since: float = 0.0) -> ProcessEvents:
    return ProcessEvents("node1", 17, complete_since, list(events))


def step(began: float, seconds: float, requests: int, batch: int) -> Event:
    return Event(STEP, began, seconds, "", {"requests": requests, "batch": batch, "joined": 0, "finished": 1})


def small_timeline(**changes) -> Timeline:
    """Ten seconds: two episodes at once and one after them, two steps with a pause, an update that begins before its iteration."""
    actors = {
        "driver": process(
            Event("sampling", BEGAN, 6.0, "", {}),
            Event("update", BEGAN - 1, 3.0, "", {}),
            Event("sync", BEGAN + 9, 3.0, "", {}),
            Event("evaluation", BEGAN - 8, 2.0, "", {}),
            Event(ITERATION, BEGAN, 10.0, "", {"number": 3}),
        ),
        "engine 0": process(step(BEGAN + 1, 1.0, 2, 2), step(BEGAN + 4, 2.0, 3, 1)),
        "env runner 1": process(
            Event(RESPONSE, BEGAN + 1, 1.0, "group 0 rollout 0", {"response_tokens": 3}),
            Event(RESPONSE, BEGAN + 1, 1.0, "group 0 rollout 1", {"response_tokens": 4}),
            Event(EPISODE, BEGAN, 4.0, "group 0 rollout 0", {"turns": 1}),
            Event(EPISODE, BEGAN, 5.0, "group 0 rollout 1", {"turns": 1}),
            Event(EPISODE, BEGAN + 4, 2.0, "group 1 rollout 0", {"turns": 0}),
        ),
    }
    return Timeline(iteration=3, began=BEGAN, seconds=10.0, actors={**actors, **changes})


def written(folder, timeline):
    write_timeline(folder / "t.json", timeline)
    return json.loads((folder / "t.json").read_text())


def spans(trace, pid):
    return [each for each in trace["traceEvents"] if each["ph"] == "X" and each["pid"] == pid]


def test_the_file_has_what_trace_viewers_read_and_nothing_outside_of_the_iteration(tmp_path):
    trace = written(tmp_path, small_timeline())
    assert all(each["ph"] in "XCM" and {"name", "pid", "args"} <= each.keys() for each in trace["traceEvents"])
    assert all(0 <= each.get("ts", 0) + each.get("dur", 0) <= 10e6 for each in trace["traceEvents"])
    assert {(each["name"], each["ts"], each["dur"]) for each in spans(trace, 1)} == {
        ("sampling", 0, 6e6),
        ("update", 0, 2e6),
        ("sync", 9e6, 1e6),
        ("iteration", 0, 10e6),
    }
    names = [each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "process_name"]
    assert names == ["driver (node1, process 17)", "engine 0 (node1, process 17)", "env runner 1 (node1, process 17)"]
    counters = [(each["ts"], *each["args"].values()) for each in trace["traceEvents"] if each["ph"] == "C"]
    assert counters == [(1e6, 2, 0), (2e6, 0, 0), (4e6, 1, 2), (6e6, 0, 0)]
    # Spans of one thread are apart or inside of each other.
    found = spans(trace, 3)
    assert len({each["tid"] for each in found}) == 2
    for first, second in itertools.permutations(found, 2):
        if first["tid"] == second["tid"] and first["ts"] <= second["ts"]:
            end, other_end = (each["ts"] + each["dur"] for each in (first, second))
            assert second["ts"] >= end or other_end <= end


def test_the_file_says_which_actors_and_events_are_missing(tmp_path):
    late = process(step(BEGAN + 8, 1.0, 1, 1), complete_since=BEGAN + 7.5)
    trace = written(tmp_path, small_timeline(**{"engine 1": None, "engine 2": late}))
    about = trace["otherData"]
    assert about["did_not_answer"] == ["engine 1"]
    assert about["complete_since_seconds"] == {"engine 2": 7.5}


def test_a_process_hands_out_the_newest_events_and_says_from_when_on_they_are_all(monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: 7.0 + now[0], monotonic=lambda: now[0])
    monkeypatch.setattr("trial_ray.process.time", clock)
    monkeypatch.setattr("trial_ray.process._events", deque(maxlen=MAX_EVENTS))  # without those of other tests
    before = clock.time()
    with event("work", rows=3):
        now[0] += 5.0
    found = process_events(before)
    assert [(each.name, each.counts) for each in found.events] == [("work", {"rows": 3})]
    assert (found.events[0].began, found.events[0].seconds) == (before, 5.0)
    assert found.complete_since < before
    assert process_events(clock.time()).events == []
    threads = [threading.Thread(target=lambda: [note_event("many", 0.0) for _ in range(MAX_EVENTS)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        process_events(before)  # while others add to it
    found = process_events(before)
    assert len(found.events) == MAX_EVENTS
    assert found.complete_since > before
    assert len(process_events(before, limit=5).events) == 5


@pytest.mark.actors
def test_a_lost_actor_is_named_and_the_others_are_there(ray_session):
    @ray.remote(num_cpus=0)
    class Recording:
        def recorded_events(self, since, most):
            note_event("work", time.monotonic())
            return process_events(since, most)

    handles = [Recording.remote() for _ in range(2)]
    actors = [RunActor("engine", index, handle) for index, handle in enumerate(handles)]
    with event(ITERATION, number=7):
        ray.kill(handles[0])
        ray.get(handles[1].__ray_ready__.remote())
    found = collect_timeline(actors, timeout_s=20.0)
    assert (found.iteration, found.actors["engine 0"]) == (7, None)
    assert [each.name for each in found.actors["engine 1"].events] == ["work"]
    assert ITERATION in {each.name for each in found.actors["driver"].events}

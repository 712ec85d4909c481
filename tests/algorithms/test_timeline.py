"""The timeline of an iteration: events that processes keep, and the trace file."""

import json
import threading
import time
from collections import deque
from types import SimpleNamespace

import pandas
import pytest
import ray

from trial_ray.algorithms.actors import RunActor
from trial_ray.algorithms.timeline import Timeline, collect_timeline, write_timeline
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


def at(name, began, seconds, track="", **counts):
    return Event(name, BEGAN + began, seconds, track, counts)


def test_the_file_has_what_trace_viewers_read_of_the_iteration_alone(tmp_path):
    """Two episodes at once and one after them, two steps with a pause, an update that begins before its iteration."""
    events = {
        "driver": [at("sampling", 0, 6), at("update", -1, 3), at("sync", 9, 3), at("evaluation", -8, 2)],
        "engine 0": [at(STEP, 1, 1.0, requests=2, batch=2), at(STEP, 4, 2.0, requests=3, batch=1)],
        "env runner 1": [
            *(at(RESPONSE, 1, 1.0, f"group 0 rollout {number}") for number in range(2)),
            at(EPISODE, 0, 4.0, "group 0 rollout 0"),
            at(EPISODE, 0, 5.0, "group 0 rollout 1"),
            at(EPISODE, 4, 2.0, "group 1 rollout 0"),
        ],
    }
    actors = {name: ProcessEvents("node1", 17, 0.0, found) for name, found in events.items()}
    actors |= {
        "engine 1": None,
        "engine 2": ProcessEvents("node1", 18, BEGAN + 7.5, [at(STEP, 8, 1.0, requests=1, batch=1)]),
    }
    write_timeline(tmp_path / "t.json", Timeline(3, BEGAN, 10.0, actors))
    trace = json.loads((tmp_path / "t.json").read_text())
    rows = pandas.DataFrame(trace["traceEvents"])
    spans = rows[rows["ph"] == "X"].set_index("pid")
    of_driver = spans.loc[1, ["name", "ts", "dur"]].to_numpy().tolist()
    assert sorted(of_driver) == [["sampling", 0, 6e6], ["sync", 9e6, 1e6], ["update", 0, 2e6]]
    names = [each["name"] for each in rows["args"][rows["name"] == "process_name"]]
    assert names[1:3] == ["engine 0 (node1, process 17)", "env runner 1 (node1, process 17)"]
    counters = [(each["ts"], *each["args"].values()) for each in trace["traceEvents"] if each["ph"] == "C"]
    assert counters[:4] == [(1e6, 2, 0), (2e6, 0, 0), (4e6, 1, 2), (6e6, 0, 0)]
    # Episodes of one thread do not overlap.
    threads = {args["of"]: tid for args, tid in spans.loc[3, ["args", "tid"]].to_numpy()}
    assert len({*threads.values()}) == 2
    assert threads["group 0 rollout 0"] == threads["group 1 rollout 0"]
    about = trace["otherData"]
    assert (about["did_not_answer"], about["complete_since_seconds"]) == (["engine 1"], {"engine 2": 7.5})


def test_a_process_hands_out_its_newest_events_and_since_when_they_are_all(monkeypatch):
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: 7.0 + now[0], monotonic=lambda: now[0])
    monkeypatch.setattr("trial_ray.process.time", clock)
    monkeypatch.setattr("trial_ray.process._events", deque(maxlen=MAX_EVENTS))  # without those of other tests
    before = clock.time()
    with event("work", rows=3):
        now[0] += 5.0
    found = process_events(before)
    assert found.events == [Event("work", before, 5.0, "", {"rows": 3})]
    assert found.complete_since < before
    assert process_events(clock.time()).events == []
    thread = threading.Thread(target=lambda: [note_event("many", 0.0) for _ in range(MAX_EVENTS)])
    thread.start()
    while thread.is_alive():
        process_events(before)  # while others add to it
    found = process_events(before)
    assert len(found.events) == MAX_EVENTS
    assert found.complete_since > before
    assert len(process_events(before, limit=5).events) == 5


@pytest.mark.actors
def test_a_lost_actor_is_named_and_the_others_are_there(ray_session):
    @ray.remote(num_cpus=0)
    class Recording:
        def __init__(self):
            note_event("work", time.monotonic())

    with event(ITERATION, number=7):
        handles = [Recording.remote() for _ in range(2)]
        ray.kill(handles[0])
        ray.get(handles[1].__ray_ready__.remote())
    actors = [RunActor("engine", index, handle) for index, handle in enumerate(handles)]
    found = collect_timeline(actors, timeout_s=20.0)
    assert (found.iteration, found.actors["engine 0"]) == (7, None)
    assert [each.name for each in found.actors["engine 1"].events] == ["work"]
    assert ITERATION in {each.name for each in found.actors["driver"].events}

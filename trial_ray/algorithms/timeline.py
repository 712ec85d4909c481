"""Timeline of an iteration, collected from the actors of a run and written in a format for trace viewers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from trial_ray.algorithms.actors import RunActor
from trial_ray.engines.pool import answers
from trial_ray.files import Json, write_text
from trial_ray.process import EPISODE, ITERATION, MAX_EVENTS, STEP, Event, ProcessEvents, process_events

SCHEMA = "trial_ray/timeline"
SCHEMA_VERSION = 1
IDLE_S = 0.001
"""Longest pause in seconds between two steps of a busy engine; in a longer pause, the engine's batch is empty."""
MAX_COLLECTED_EVENTS = 200_000
"""Maximum number of events of all actors together, which limits the driver's work in large clusters."""
DRIVER = "driver"


@dataclass(frozen=True)
class Timeline:
    """Events of all processes of a run in one iteration.

    Attributes:
        iteration: counted from 1.
        began: start of the iteration, ``time.time()`` on the driver's node.
        seconds: duration of the iteration.
        actors: events by actor name; ``None`` for an actor that did not answer.
    """

    iteration: int
    began: float
    seconds: float
    actors: Mapping[str, ProcessEvents | None]


def collect_timeline(actors: Sequence[RunActor], timeout_s: float) -> Timeline | None:
    """Collect and return the timeline of this process's last iteration; ``None`` if there was no iteration.

    Args:
        actors: actors of the run.
        timeout_s: seconds that the actors have to answer; events of actors that do not answer are missing.
    """
    own = process_events(since=0.0)
    iteration = next((event for event in reversed(own.events) if event.name == ITERATION), None)
    if iteration is None:
        return None
    per_actor = min(MAX_EVENTS, max(1, MAX_COLLECTED_EVENTS // (1 + len(actors))))
    window = (iteration.began, per_actor)
    answered = answers(
        [actor.handle.__ray_call__.remote(lambda _: process_events(*window)) for actor in actors], timeout_s
    )
    return Timeline(
        iteration=int(iteration.counts["number"]),
        began=iteration.began,
        seconds=iteration.seconds,
        actors={
            DRIVER: process_events(*window),
            **{actor.name: events for actor, events in zip(actors, answered, strict=True)},
        },
    )


def write_timeline(file: Path, timeline: Timeline | None) -> None:
    """Write a timeline in Chrome's JSON trace format, which Perfetto and ``chrome://tracing`` read; ``None`` is ignored.

    Times are microseconds since the start of the iteration. A process of the trace is an actor of the run. Each kind of
    event outside episodes has a thread, and overlapping episodes are in separate threads. ``otherData`` lists missing data.
    """
    if timeline is None:
        return
    events: list[Json] = []
    silent, cut = [], {}
    for pid, (name, recorded) in enumerate(timeline.actors.items(), start=1):
        if recorded is None:
            silent.append(name)
            continue
        events += _actor_events(pid, name, recorded, timeline)
        if recorded.complete_since > timeline.began:
            cut[name] = round(recorded.complete_since - timeline.began, 6)
    trace = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "displayTimeUnit": "ms",
        "otherData": {
            "iteration": timeline.iteration,
            "began": timeline.began,
            "seconds": timeline.seconds,
            "clock": "time.time() of each node; nodes are as far apart as their clocks",
            "did_not_answer": silent,
            "complete_since_seconds": cut,
        },
        "traceEvents": events,
    }
    write_text(file, json.dumps(trace, allow_nan=False, separators=(",", ":")))


def _actor_events(pid: int, name: str, recorded: ProcessEvents, timeline: Timeline) -> Iterator[Json]:
    yield _metadata("process_name", pid, 0, f"{name} ({recorded.host}, process {recorded.pid})")
    tids: dict[str, int] = {}
    for event, thread in _with_threads(recorded.events):
        if thread not in tids:
            tids[thread] = len(tids) + 1
            yield _metadata("thread_name", pid, tids[thread], thread)
        began = max(event.began, timeline.began)
        ended = min(event.began + event.seconds, timeline.began + timeline.seconds)
        if began <= ended:
            yield {
                "name": event.name,
                "cat": name,
                "ph": "X",
                "pid": pid,
                "tid": tids[thread],
                "ts": _microseconds(began - timeline.began),
                "dur": _microseconds(ended - began),
                "args": dict(event.counts) | ({"of": event.track} if event.track else {}),
            }
    steps = [
        event
        for event in recorded.events
        if event.name == STEP and 0 <= event.began - timeline.began <= timeline.seconds
    ]
    yield from _batch_sizes(pid, steps, timeline)


def _batch_sizes(pid: int, steps: Sequence[Event], timeline: Timeline) -> Iterator[Json]:
    """Yield counter events with the numbers of requests that an engine is computing and of requests that wait in the engine."""
    for step, following in zip_longest(steps, steps[1:]):
        batch = step.counts["batch"]
        ended = min(step.began + step.seconds, timeline.began + timeline.seconds)
        sizes = [(step.began, batch, step.counts["requests"] - batch)]
        if following is None or following.began - ended > IDLE_S:
            sizes.append((ended, 0, 0))
        for at, computed, queued in sizes:
            yield {
                "name": "batch",
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "ts": _microseconds(at - timeline.began),
                "args": {"computed": computed, "queued": queued},
            }


def _with_threads(events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """Yield each event with the name of the trace's thread that shows it.

    An event outside episodes is in a thread that has the event's name. The events of an episode are in the first of the episode
    threads that shows no other episode at that time.
    """
    spans: dict[str, list[float]] = {}
    for event in events:
        if event.track:
            span = spans.setdefault(event.track, [event.began, 0.0])
            span[:] = min(span[0], event.began), max(span[1], event.began + event.seconds)
    free_from: list[float] = []
    threads: dict[str, str] = {}
    for track, (began, ended) in sorted(spans.items(), key=lambda item: item[1]):
        index = next((index for index, free in enumerate(free_from) if free <= began), len(free_from))
        free_from[index : index + 1] = [ended]
        threads[track] = f"{EPISODE} {index + 1}"
    for event in sorted(events, key=lambda event: (event.began, -event.seconds)):
        yield event, threads[event.track] if event.track else event.name


def _metadata(kind: str, pid: int, tid: int, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)

"""The timeline of an iteration: a file for trace viewers, and the chart that a report draws of it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.files import checked_content, read_json, write_text
from trial_ray.process_events import EPISODE, ITERATION, RESPONSE, STEP, Event, ProcessEvents, Timeline
from trial_ray.reports.charts import DASH, Table

FILE = "timeline.json"
SCHEMA = "trial_ray/timeline"
SCHEMA_VERSION = 1
IDLE_S = 0.001
"""Between two steps of an engine: above it the batch was empty."""
BINS = 400
"""Times at which the chart has a batch size."""
LANES = 4
"""Actors of a kind in the chart."""


def write_timeline(file: Path, timeline: Timeline) -> Path:
    """Write a timeline in the JSON trace format of Chrome, which Perfetto and ``chrome://tracing`` read.

    Times are microseconds since the iteration began. A process of the trace is an actor of the run; threads are kinds of events,
    and one for each episode that was played at the same time as others. ``otherData`` says what is missing.
    """
    events: list[dict[str, Any]] = []
    silent, cut = [], {}
    for pid, (name, found) in enumerate(timeline.actors.items(), start=1):
        if found is None:
            silent.append(name)
            continue
        events += _actor_events(pid, name, found, timeline)
        if found.complete_since > timeline.began:
            cut[name] = round(found.complete_since - timeline.began, 6)
    other = {
        "iteration": timeline.iteration,
        "began": timeline.began,
        "seconds": timeline.seconds,
        "clock": "time.time() of each node; nodes are as far apart as their clocks",
        "did_not_answer": silent,
        "complete_since_seconds": cut,
    }
    head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "displayTimeUnit": "ms", "otherData": other}
    return write_text(file, json.dumps({**head, "traceEvents": events}, allow_nan=False, separators=(",", ":")))


def _actor_events(pid: int, name: str, found: ProcessEvents, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, f"{name} ({found.host}, process {found.pid})")
    tids: dict[str, int] = {}
    for event, thread in _with_threads(found.events):
        if thread not in tids:
            tids[thread] = len(tids) + 1
            yield _named("thread_name", pid, tids[thread], thread)
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
        event for event in found.events if event.name == STEP and 0 <= event.began - timeline.began <= timeline.seconds
    ]
    yield from _batch_sizes(pid, steps, timeline)


def _batch_sizes(pid: int, steps: Sequence[Event], timeline: Timeline) -> Iterator[dict[str, Any]]:
    """A counter of the requests that an engine computes, and of those that wait there."""
    for step, following in zip_longest(steps, steps[1:]):
        batch = step.counts["batch"]
        ended = min(step.began + step.seconds, timeline.began + timeline.seconds)
        sizes = [(step.began, batch, step.counts["requests"] - batch)]
        if following is None or following.began - ended > IDLE_S:
            sizes.append((ended, 0, 0))
        for at, computed, queued in sizes:
            args = {"computed": computed, "queued": queued}
            yield {
                "name": "batch",
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "ts": _microseconds(at - timeline.began),
                "args": args,
            }


def _with_threads(events: Sequence[Event]) -> Iterator[tuple[Event, str]]:
    """Each event with its thread: the name of the event, or of episodes the first thread that is free while they last."""
    spans: dict[str, list[float]] = {}
    for event in events:
        if event.track:
            span = spans.setdefault(event.track, [event.began, 0.0])
            span[:] = min(span[0], event.began), max(span[1], event.began + event.seconds)
    free_from: list[float] = []
    threads: dict[str, str] = {}
    for track, (began, ended) in sorted(spans.items(), key=lambda item: item[1]):
        index = next((index for index, free in enumerate(free_from) if free <= began), len(free_from))
        free_from[index:] = [ended, *free_from[index + 1 :]]
        threads[track] = f"{EPISODE} {index + 1}"
    for event in sorted(events, key=lambda event: (event.began, -event.seconds)):
        yield event, threads[event.track] if event.track else event.name


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


def read_timeline(file: Path) -> dict[str, Any]:
    """The chart of a timeline: values of its lanes, and a table of them.

    Raises:
        CheckpointError: the file is not what :func:`write_timeline` writes.
    """
    trace = read_json(file, SCHEMA, SCHEMA_VERSION)
    with checked_content(file):
        return _chart(trace["otherData"], trace["traceEvents"])


def _chart(about: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = {
        event["pid"]: event["args"]["name"].partition(" (")[0] for event in events if event["name"] == "process_name"
    }
    spans: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
    lanes = [_lane(names[pid], own, float(about["seconds"])) for pid, own in spans.items()]
    kinds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for lane in lanes:
        kinds[lane["name"].rstrip("0123456789")].append(lane)
    silent = [f"{name} did not answer." for name in about["did_not_answer"]]
    cut = [f"{name} kept events from {at:.1f} s on." for name, at in about["complete_since_seconds"].items()]
    title = f"Timeline of iteration {int(about['iteration'])}"
    return {
        "name": "timeline",
        "title": title,
        "axis": "seconds",
        "text": " ".join([f"{FILE} opens in Perfetto (ui.perfetto.dev).", *silent, *cut]),
        "seconds": float(about["seconds"]),
        "lanes": [lane for group in kinds.values() for lane in group[:LANES]],
        "table": Table(title, ["actor", "what", "figure"], [row for lane in lanes for row in lane["rows"]]),
    }


def _lane(name: str, spans: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What is drawn of an actor: bars of its work, or how much it had to do in each of :data:`BINS` times."""
    times = (np.arange(BINS) + 0.5) * seconds / BINS
    named: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        named[span["name"]].append(span)
    lane: dict[str, Any] = {"name": name, "times": times, "levels": {}, "rows": list(_rows(name, named, seconds))}
    if STEP in named:
        batch = np.array([span["args"]["batch"] for span in named[STEP]])
        requests = np.array([span["args"]["requests"] for span in named[STEP]])
        lane["levels"] = {
            "computed": _level(named[STEP], batch, seconds),
            "queued": _level(named[STEP], requests - batch, seconds),
        }
    elif RESPONSE in named:
        waiting = _level(named[RESPONSE], np.ones(len(named[RESPONSE])), seconds)
        playing = _level(named[EPISODE], np.ones(len(named[EPISODE])), seconds)
        lane["levels"] = {"wait for a response": waiting, "in the environment": np.maximum(0, playing - waiting)}
    lane["bars"] = list(_nested([span for span in spans if span["name"] not in (STEP, EPISODE, RESPONSE, ITERATION)]))
    return lane


def _nested(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float, int]]:
    """Name, beginning, seconds of each span, and how many others it lies in."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        open_until = [end for end in open_until if end > span["ts"] + 1]  # rounded
        yield span["name"], span["ts"] / 1e6, span["dur"] / 1e6, len(open_until)
        open_until.append(span["ts"] + span["dur"])


def _level(spans: Sequence[Mapping[str, Any]], values: np.ndarray, seconds: float) -> np.ndarray:
    """Sum of the values of the spans under way, its mean in each of :data:`BINS` equal times."""
    if not spans:
        return np.zeros(BINS)
    began, lasted = (np.array([span[key] for span in spans], dtype=float) / 1e6 for key in ("ts", "dur"))
    changes = np.concatenate([values, -values])
    times = np.concatenate([began, began + lasted])
    order = np.argsort(times, kind="stable")
    times, levels = times[order], np.cumsum(changes[order])
    area = np.concatenate([[0.0], np.cumsum(levels[:-1] * np.diff(times))])
    means: np.ndarray = np.diff(np.interp(np.linspace(0, seconds, BINS + 1), times, area)) * BINS / seconds
    return means


def _rows(actor: str, spans: Mapping[str, Sequence[Mapping[str, Any]]], seconds: float) -> Iterator[list[str]]:
    """Figures of an actor, from its spans by their names."""
    sums = {name: sum(span["dur"] for span in found) / 1e6 for name, found in spans.items()}
    counts = {name: len(found) for name, found in spans.items()}
    if STEP in counts:
        batches = [span["args"]["batch"] * span["dur"] / 1e6 for span in spans[STEP]]
        yield [actor, "steps", f"{counts[STEP]:,}"]
        yield [actor, "computing, of the iteration", f"{sums[STEP] / seconds:.1%}"]
        yield [actor, "mean batch while computing", f"{sum(batches) / sums[STEP]:.1f}" if sums[STEP] else DASH]
    if RESPONSE in counts:
        rest = max(0.0, sums.get(EPISODE, 0.0) - sums[RESPONSE]) / counts[RESPONSE]
        yield [actor, "episodes", f"{counts.get(EPISODE, 0):,}"]
        yield [actor, "responses", f"{counts[RESPONSE]:,}"]
        yield [actor, "wait for a response, mean", f"{1e3 * sums[RESPONSE] / counts[RESPONSE]:.1f} ms"]
        yield [actor, "rest of a turn (environment, prompt, other episodes), mean", f"{1e3 * rest:.1f} ms"]
    for name in sorted(counts.keys() - {STEP, EPISODE, RESPONSE, ITERATION}):
        yield [actor, name, f"{sums[name]:.2f} s" + (f" in {counts[name]:,}" if counts[name] > 1 else "")]

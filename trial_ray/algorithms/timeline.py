"""Collects what the actors of a run did in its last iteration."""

from __future__ import annotations

from collections.abc import Sequence

from trial_ray.algorithms.actors import RunActor
from trial_ray.engines.pool import answers
from trial_ray.process_events import ITERATION, MOST_EVENTS, Timeline, process_events

MOST_COLLECTED = 200_000
"""Events of all actors together, so that the driver's part does not grow with the cluster."""
DRIVER = "driver"


def collect_timeline(actors: Sequence[RunActor], timeout_s: float) -> Timeline | None:
    """The timeline of the last iteration of this process; ``None`` where there was none.

    Args:
        actors: of the run.
        timeout_s: in which they have to answer; those that do not are missing.
    """
    own = process_events(since=0.0)
    iteration = next((each for each in reversed(own.events) if each.name == ITERATION), None)
    if iteration is None:
        return None
    most = min(MOST_EVENTS, max(1, MOST_COLLECTED // (1 + len(actors))))
    found = answers([actor.handle.recorded_events.remote(iteration.began, most) for actor in actors], timeout_s)
    return Timeline(
        iteration=int(iteration.counts["number"]),
        began=iteration.began,
        seconds=iteration.seconds,
        actors={
            DRIVER: process_events(iteration.began, most),
            **{actor.name: events for actor, events in zip(actors, found, strict=True)},
        },
    )

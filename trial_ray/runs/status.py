"""What `trial-ray status` shows of a run: a small file among Ray's logs on the driver's node, which the dashboard serves.

The driver replaces the file with each iteration. Reading it does not involve the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trial_ray.files import write_json
from trial_ray.metrics import LEARNER, METRICS, PANEL_SUCCESS

FOLDER = "trial_ray"
"""In Ray's folder of logs; a file a process, named by its job and its id."""
LOSS = f"{LEARNER}total_loss"
STARTING, RUNNING, EVALUATING = "starting", "running", "evaluating"
ACTIVE = (STARTING, RUNNING, EVALUATING)
"""States of a driver that lives; how it ended is said in the words of ``run.json``."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of a run or sweep.

    Attributes:
        run: its folder.
        state: one of :data:`ACTIVE`, or ``done``, ``interrupted`` or ``failed``.
        unit: what is counted: ``iteration``, or ``trial`` of a sweep.
        done: how many are.
        total: in all; ``None`` where another criterion ends the run.
        seconds: that one takes, on average of this command; ``None`` before the first.
        metrics: some of the last iteration's, by key of :data:`~trial_ray.metrics.METRICS`.
        actors: names of the run's actors by Ray's id of each.
        restarts: of the run from its checkpoint.
        faults: what was lost and replaced in the last iteration in which something was.
        error: that ended it.
        updated: ``time.time()`` on the driver's node.
    """

    run: str
    state: str = STARTING
    unit: str = "iteration"
    done: int = 0
    total: int | None = None
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    actors: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    faults: str = ""
    error: str = ""
    updated: float = 0.0

    @classmethod
    def parse(cls, text: bytes) -> RunStatus:
        """A status that :class:`StatusFile` wrote.

        Raises:
            ValueError: it is damaged, or of another version of this package.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from error

    @property
    def seconds_left(self) -> float | None:
        """Until the last iteration's end; ``None`` where that is unknown."""
        if self.state not in ACTIVE or self.seconds is None or self.total is None:
            return None
        return max(0, self.total - self.done) * self.seconds


class StatusFile:
    """Publishes the state of a run on its cluster; without a cluster it does nothing.

    Args:
        run: the folder.
        known: fields of :class:`RunStatus`.

    Attributes:
        shown: now.
        job: Ray's id of this driver's job.
        dashboard: address of the cluster's; empty where there is none.
    """

    def __init__(self, run: Path, **known: Any) -> None:
        self.shown = RunStatus(str(run), **known)
        self._path: Path | None = None
        self.job = self.dashboard = ""

    def open(self) -> StatusFile:
        """Begin to show, as soon as Ray is connected."""
        import ray

        from trial_ray.ray_internals import driver_place

        place = driver_place() if ray.is_initialized() else None
        if place is not None:
            self.dashboard, logs = place
            self.job = ray.get_runtime_context().get_job_id()
            self._path = logs / FOLDER / f"{self.job}-{os.getpid()}.json"
            self.show()
        return self

    def show(self, **changes: Any) -> None:
        """Replace fields of the :class:`RunStatus` that is shown."""
        self.shown = replace(self.shown, **changes, updated=time.time())
        if self._path is not None:
            with suppress(OSError, ValueError):  # the run itself needs no one to see it
                write_json(self._path, asdict(self.shown))


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that the terminal's line of an iteration has, the loss, and success on the evaluation set."""
    return {
        key: metrics[key]
        for key in metrics
        if key in (LOSS, PANEL_SUCCESS) or (key in METRICS and METRICS[key].column is not None)
    }

"""The table of `make test-faults`: what was injected when, how it ended, after how long, and that nothing was lost or left."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from trial_ray.runs.metric_files import flatten

MARK = "TRIAL_FAULTS_MARK"
"""Environment variable that every process of the tests inherits."""
FOLDER = Path("build/faults")
LEFT_TIMEOUT_S = 30.0
RAYS_OWN = (
    "gcs_server", "raylet", "log_monitor.py", "monitor.py", "dashboard", "DashboardAgent", "runtime_env", "RuntimeEnvAgent",
    "ray::IDLE", "default_worker.py", "multiprocessing.resource_tracker",
)  # fmt: skip
"""What tells a process of Ray's that lives as long as its session, and workers that wait for work."""


@dataclass(frozen=True)
class FaultRow:
    """One fault.

    Attributes:
        fault: what was done.
        injected: at which moment.
        outcome: how the run went on or ended.
        seconds: from the fault (where its moment is not known, from the begin of the iteration) to the end of the iteration
            that it disturbed, or of the run where that stopped; ``None`` where nothing ran.
        lost: rows that were sampled and neither trained nor left out for a reason that the run names.
    """

    fault: str
    injected: str
    outcome: str
    seconds: float | None = None
    lost: int = 0


def lost_rows(metrics: dict[str, Any]) -> int:
    """Rows of one iteration that nobody accounts for; ``metrics`` as RLlib's nested result or a line of ``metrics.jsonl``."""
    flat = flatten(metrics)
    read = {
        name: int(flat.get(f"rows/{name}", 0))
        for name in ("sampled", "given_to_learners", "left_out", "redrawn", "stale")
    }
    learner = "learners/default_policy/"
    trained = int(flat.get(f"{learner}num_module_steps_trained", 0)) + int(flat.get(f"{learner}rows/skipped", 0))
    dropped = read["left_out"] + read["redrawn"] + read["stale"]
    return abs(read["sampled"] - read["given_to_learners"] - dropped) + abs(read["given_to_learners"] - trained)


def mark_processes() -> str:
    """Have everything that this process starts inherit a mark, which is returned."""
    return os.environ.setdefault(MARK, uuid.uuid4().hex)


def processes_left(mark: str) -> list[str]:
    """Titles of marked processes, besides this one and Ray's own, that are still there after a while."""
    deadline = time.monotonic() + LEFT_TIMEOUT_S
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            title = " ".join(process.cmdline())
            if process.environ().get(MARK) == mark and not any(part in title for part in RAYS_OWN):
                found.append(f"{process.pid} {title}")
        except psutil.Error:
            continue
    return found


def write(rows: Iterable[FaultRow], left: int) -> list[str]:
    """Write ``table.json`` and return the table's lines."""
    found = sorted(rows, key=lambda row: (row.fault, row.injected))
    FOLDER.mkdir(parents=True, exist_ok=True)
    content = {"faults": [asdict(row) for row in found], "processes_left": left}
    (FOLDER / "table.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    cells = [("fault", "injected at", "outcome", "seconds", "rows lost")]
    cells += [
        (row.fault, row.injected, row.outcome, "" if row.seconds is None else f"{row.seconds:.1f}", str(row.lost))
        for row in found
    ]
    return ["| " + " | ".join(line) + " |" for line in (cells[0], ("---",) * len(cells[0]), *cells[1:])]

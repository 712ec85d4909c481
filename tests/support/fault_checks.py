"""What no fault may do: lose a row without a reason, or leave a process behind."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from trial_ray.runs.metrics_file import flatten

MARK = "TRIAL_FAULTS_MARK"
"""Environment variable that every process of the tests inherits."""
LEFT_TIMEOUT_S = 30.0
RAYS_OWN = (
    "gcs_server", "raylet", "log_monitor.py", "monitor.py", "dashboard", "DashboardAgent", "runtime_env", "RuntimeEnvAgent",
    "ray::IDLE", "default_worker.py", "multiprocessing.resource_tracker", "multiprocessing.forkserver",
)  # fmt: skip
"""What tells a process that lives as long as Ray's session or this one, and workers that wait for work."""


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


TIMES = ("time", "seconds", "timestamp", "date", "memory", "throughput", "pid", "iterations_since_restore")
"""Parts of the names of metrics that measure the machine, or name the process."""


def repeatable_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every iteration that a run folder has, without those that depend on the machine or the process."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in whole]


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

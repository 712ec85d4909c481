"""What no fault may do: lose a row without a reason, or leave a process behind."""

import json
import os
import time
from collections import Counter
from contextlib import suppress

import psutil

from trial_ray.runs.metrics_file import flatten

MARK = "TRIAL_FAULTS_MARK"
"""Environment variable with a value that every process of the tests inherits."""
LEFT_TIMEOUT_S = 30.0
RAYS_OWN = (
    "gcs_server", "raylet", "log_monitor.py", "monitor.py", "dashboard", "DashboardAgent", "runtime_env", "RuntimeEnvAgent",
    "ray::IDLE", "default_worker.py", "multiprocessing.resource_tracker", "multiprocessing.forkserver",
)  # fmt: skip
"""What tells a process that lives as long as Ray's session or this one, and workers that wait for work."""


def lost_rows(metrics):
    """Rows of one iteration that nobody accounts for; ``metrics`` as RLlib's nested result or a line of ``metrics.jsonl``."""
    counts, learner = Counter(flatten(metrics)), "learners/default_policy/"
    given = counts["rows/given_to_learners"]
    dropped = counts["rows/left_out"] + counts["rows/redrawn"] + counts["rows/stale"]
    trained = counts[f"{learner}num_module_steps_trained"] + counts[f"{learner}rows/skipped"]
    return abs(counts["rows/sampled"] - given - dropped) + abs(given - trained)


TIMES = ("time", "seconds", "timestamp", "date", "memory", "throughput", "pid", "iterations_since_restore")
"""Parts of the names of metrics that measure the machine, or name the process."""


def written_metrics(run):
    """The metrics of every iteration that a run folder has, without a line that is being written."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def repeatable_metrics(run):
    """The metrics of every iteration that a run folder has, without those that depend on the machine or the process."""
    return [
        {name: value for name, value in line.items() if not any(part in name for part in TIMES)}
        for line in written_metrics(run)
    ]


def processes_left():
    """Titles of marked processes, besides this one and Ray's own, that are still there after a while."""
    deadline = time.monotonic() + LEFT_TIMEOUT_S
    while (found := _marked()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _marked():
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARK) == os.environ[MARK]
                and not any(part in title for part in RAYS_OWN)
            ):
                found.append(f"{process.pid} {title}")
    return found

"""What Ray's GCS keeps of calls to actors, without this package: callers and callees like the soak's, killed as often.

    python tests/faults/bare_ray.py
    RAY_task_events_report_interval_ms=0 python tests/faults/bare_ray.py      # Ray keeps no record of calls

An iteration stands for one of ``soak.py``: 32 episodes and 54 calls, most of them from one actor to another.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

ITERATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
EPISODES, EXCHANGES, OTHER_CALLS = 32, 22, 4
"""Of an iteration: episodes; calls of the callees, and of itself, by each of two callers."""
KILL_CALLEE_EVERY, KILL_CALLER_EVERY = 25, 20
ANSWER_S = 120.0


@ray.remote(num_cpus=0.25)
class Callee:
    """An engine that computes nothing."""

    async def exchange(self, message: bytes) -> bytes:
        return message


@ray.remote(num_cpus=0.25, max_restarts=-1)
class Caller:
    """An env runner that plays nothing."""

    def sample(self, callees: list[Any], calls: int) -> int:
        answers = [callees[index % len(callees)].exchange.remote(bytes(2000)) for index in range(calls)]
        return len(ray.get(answers, timeout=ANSWER_S))

    def report(self) -> int:
        return os.getpid()


def main() -> None:
    ray.init(num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False)
    try:
        points = _measure()
    finally:
        ray.shutdown()
    episodes, memory = np.array(points[len(points) // 5 :]).T
    slope = np.polyfit(episodes / 1000, memory, 1)[0]
    calls = 2 * (1 + EXCHANGES + OTHER_CALLS) * 1000 / EPISODES
    print(f"GCS: {slope:+.2f} MiB per 1,000 episodes, which are {calls:.0f} calls; {memory[-1]:.0f} MiB in the end")


def _measure() -> list[tuple[int, float]]:
    (gcs,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "gcs_server"]
    callees, callers = [Callee.remote(), Callee.remote()], [Caller.remote(), Caller.remote()]
    points = []
    for iteration in range(1, ITERATIONS + 1):
        if iteration % KILL_CALLEE_EVERY == 0:
            ray.kill(callees[1])
            callees[1] = Callee.remote()
        if iteration % KILL_CALLER_EVERY == 0:
            before = ray.get(callers[1].report.remote(), timeout=ANSWER_S)
            ray.kill(callers[1], no_restart=False)
            _wait_for_another(callers[1], before)
        calls = [caller.sample.remote(callees, EXCHANGES) for caller in callers]
        calls += [caller.report.remote() for caller in callers for _ in range(OTHER_CALLS)]
        ray.get(calls, timeout=ANSWER_S)
        time.sleep(0.2)  # records are sent once a second
        points.append((EPISODES * iteration, _own_memory(gcs.pid)))
    return points


def _wait_for_another(caller: Any, pid: int) -> None:
    """Until Ray has restarted it: the process answers for a moment after it was killed, and calls fail until there is another."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ray.exceptions.RayError):
            if ray.get(caller.report.remote(), timeout=ANSWER_S) != pid:
                return
        time.sleep(0.2)
    raise TimeoutError(f"Ray did not restart the caller within {ANSWER_S:.0f} s")


def _own_memory(pid: int) -> float:
    """In MiB, as ``soak.py`` counts it."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


if __name__ == "__main__":
    main()

"""What a step costs where an environment runs in a process of its own, and what such a process takes.

    python benchmarks/bench_env_steps.py --json benchmarks/results/env_steps.json

The same steps of a generated household, and of an environment that does nothing, in the event loop's thread and in a process of
their own; rounds of both take turns, and the fastest round of each counts. A process's memory is what it has for itself (private
pages) after a household was loaded; its start is measured beside a running one, without the environment's own loading.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import psutil
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Text
from measure import Measure, write_report

from trial_ray.environments import EnvironmentAdapter, EnvironmentEntry
from trial_ray.environments.alfworld import ADAPTER
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.processes import EnvProcesses, ProcessEnv, ProcessLimits
from trial_ray.environments.registry import find_spec

ROUNDS, STEPS, STARTS = 50, 40, 10
LIMITS = ProcessLimits(step_timeout_s=60)


class IdleEnv(gymnasium.Env):
    """Answers at once."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = Text(10)

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return "", 0.0, False, False, {}


def entries() -> dict[str, EnvironmentEntry]:
    household = {"split": "generated", "difficulty": "tiny", "num_games": 1}
    idle = EnvSpec("bench/Idle-v0", entry_point=IdleEnv)
    return {
        "an idle environment": EnvironmentEntry(idle, EnvironmentAdapter(idle.id), {}),
        "a household": EnvironmentEntry(find_spec(ADAPTER.env_id), ADAPTER, household),
    }


async def answer_of(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def microseconds(env: GuardedEnv | ProcessEnv, task: str) -> float:
    """Of one step, mean over :data:`STEPS`."""
    await answer_of(env.reset(task, 0))
    began = time.perf_counter()
    for _ in range(STEPS):
        await answer_of(env.step("look"))
    return (time.perf_counter() - began) / STEPS * 1e6


async def compare(entry: EnvironmentEntry, processes: EnvProcesses) -> tuple[float, float]:
    """Microseconds of a step in this process and in another one."""
    task = entry.tasks()[0]
    here, there = GuardedEnv(entry), ProcessEnv(entry, (), processes, LIMITS)
    rounds = [(await microseconds(here, task), await microseconds(there, task)) for _ in range(ROUNDS)]
    here.close()
    there.close()
    return min(each for each, _ in rounds), min(each for _, each in rounds)


async def start(entry: EnvironmentEntry, processes: EnvProcesses) -> tuple[list[float], list[float]]:
    """Seconds until each of several processes has answered its first reset, and private memory of each in MB."""
    server = psutil.Process(processes._server.pid)
    before, task = {child.pid for child in server.children()}, entry.tasks()[0]
    envs, seconds = [], []
    for _ in range(STARTS):
        envs.append(ProcessEnv(entry, (), processes, LIMITS))
        began = time.perf_counter()
        await envs[-1].reset(task, 0)
        seconds.append(time.perf_counter() - began)
    memory = [child.memory_full_info().uss / 1e6 for child in server.children() if child.pid not in before]
    for env in envs:
        env.close()
    return seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    processes, found = EnvProcesses(), entries()
    try:
        steps = {name: asyncio.run(compare(entry, processes)) for name, entry in found.items()}
        seconds, _ = asyncio.run(start(found["an idle environment"], processes))
        _, memory = asyncio.run(start(found["a household"], processes))
    finally:
        processes.close()
    measures = [
        Measure(
            f"what a process of its own adds to a step of {name}", (there - here) / 1000, "ms",
            note=f"{here / 1000:.3g} ms in the runner, {there / 1000:.3g} ms in a process",
        )
        for name, (here, there) in steps.items()
    ]  # fmt: skip
    measures += [
        Measure("start of an environment's process", min(seconds), "s", note="after the runner's first one"),
        Measure("memory of a household's process", statistics.median(memory), "MB", note="private pages"),
    ]
    write_report(args.json, measures, {"microseconds": steps, "start_s": seconds, "private_mb": memory})


if __name__ == "__main__":
    main()

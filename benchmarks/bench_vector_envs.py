"""Speed of Gymnasium's vector environments with generated ALFWorld games: shared memory, pipes, and in sequence.

    python benchmarks/bench_vector_envs.py --json benchmarks/results/vector_envs.json

Four environments take the same random actions in each vector environment. The rounds are interleaved and a ratio is the
median of the rounds' ratios, because other work on the machine changes the speeds of all three. A round begins with steps
that are not measured, so that the time excludes the translation of each process's first game; it includes that of later games.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import psutil
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from measure import Measure, cpu_seconds, interleaved, report_parser, write_report

import trial_envs

ENVS, WARM_UP, STEPS = 4, 50, 500


def make_env() -> gymnasium.Env:
    return gymnasium.make("trial/ALFWorld-v0", split="generated", num_games=ENVS)


def play(make: Callable[[list[Callable[[], gymnasium.Env]]], VectorEnv]) -> dict[str, float]:
    """Return environment steps per second, and microseconds of CPU time per step, summed over all processes."""
    env = make([make_env] * ENVS)
    rng = random.Random(0)
    _, info = env.reset(seed=0)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    began, cpu = 0.0, 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            began, cpu = time.perf_counter(), cpu_seconds(*processes)
        actions = [rng.choice(listed) for listed in info["admissible_actions"]]
        info = env.step(actions)[-1]
    wall, cpu = time.perf_counter() - began, cpu_seconds(*processes) - cpu
    env.close()
    return {"steps_per_second": ENVS * STEPS / wall, "cpu_us_a_step": 1e6 * cpu / (ENVS * STEPS)}


CONTESTANTS: dict[str, Callable[[Any], VectorEnv]] = {
    "shared memory": AsyncVectorEnv,
    "pipes": partial(AsyncVectorEnv, shared_memory=False),
    "in sequence": SyncVectorEnv,
}


def ratio(found: dict[str, list[dict[str, float]]], other: str) -> float:
    """Return the speed with shared memory divided by that of ``other``, as the median over rounds."""
    pairs = zip(found["shared memory"], found[other], strict=True)
    return statistics.median(ours["steps_per_second"] / theirs["steps_per_second"] for ours, theirs in pairs)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    trial_envs.register()
    play(SyncVectorEnv)  # fills caches, which the processes of later rounds inherit
    players = {name: partial(play, make) for name, make in CONTESTANTS.items()}
    found = interleaved(players, args.rounds, warm_up=False)
    medians = {
        name: {key: statistics.median(played[key] for played in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    note = "; ".join(
        f"{name} {figures['steps_per_second']:,.0f} steps/s, {figures['cpu_us_a_step']:.0f} µs of CPU a step"
        for name, figures in medians.items()
    )
    measures = [
        Measure(
            f"ALFWorld, {ENVS} environments with shared memory: steps a second against {other}",
            ratio(found, other),
            note=note,
        )
        for other in ("pipes", "in sequence")
    ]
    write_report(args.json, measures, {"medians": medians, "rounds": found})


if __name__ == "__main__":
    main()

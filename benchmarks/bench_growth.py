"""How the time and memory of an update grow with trajectories, turns, tokens and learners, and whether the driver's memory stays.

    python benchmarks/bench_growth.py --json benchmarks/results/growth.json --plot docs/assets/growth.png

An update (scoring of both views, forward and backward passes, optimizer) of the smallest model on made-up trajectories, whose
prompts share their beginnings as those of a real task do. One quantity is doubled at a time, each in a process of its own. The
growth is the exponent e of ``amount ** e`` that fits the amounts best (least squares of the logarithms): 1 is linear. Memory is the
most that was resident during the update, above what the process held before. With learners the rows grow alike (each learner has
as many as the only one), processes exchange gradients by gloo, and memory is that of all of them. The driver's memory is watched
over iterations of GRPO with all actors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from learners import build_learner
from local_ray import local_ray
from measure import Measure, seconds_of, write_report
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray import GRPOConfig, TRIALConfig
from trial_ray.environments.alfworld import ADAPTER
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.groups import GroupRefs
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

BASE = {"trajectories": 32, "turns": 4, "tokens": 96}
SIZES = {
    "trajectories": (32, 64, 128, 256),
    "turns": (4, 8, 16, 32),
    "tokens": (96, 192, 384, 768),
    "learners": (1, 2),
}
MOST_EXPONENT = 1.05
REPEATS = 3
GROUP_SIZE = 8
VOCABULARY = 300
ITERATIONS = 40
UNCOUNTED = 10
"""Iterations before the driver's memory counts: libraries are still being loaded."""


# ---- the work ----


def make_groups(trajectories: int, turns: int, tokens: int, seed: int = 0) -> list[TrajectoryGroup]:
    """Groups of rollouts; ``tokens`` in a prompt, of which the first half is the task's, responses of 4."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray:
        return rng.integers(10, VOCABULARY, count).astype(np.int32)

    def turn(task: np.ndarray) -> Turn:
        prompt = np.concatenate([task, ids(tokens - len(task))])
        zeros = np.zeros(4, np.float32)
        return Turn(prompt, ids(4), zeros, 1, len(prompt) - 1, "", "look", True, "Nothing happens.", 0.0, "stop")

    groups = []
    for number in range(trajectories // GROUP_SIZE):
        task = ids(tokens // 2)
        rollouts = [
            Trajectory(f"task-{number}", "pick", index, [turn(task) for _ in range(turns)], index % 2 == 0)
            for index in range(GROUP_SIZE)
        ]
        groups.append(TrajectoryGroup(f"task-{number}", rollouts))
    return groups


def save_model(folder: Path) -> str:
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    build_tiny_model(tokenizer, "nano").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def config_of(model_path: str, num_learners: int = 0) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path=model_path)
        .training(kl_coeff=0.0, hindsight_start_iteration=1, max_logprob_gap=1e9, max_tokens_per_forward=8192)
        .learners(num_learners=num_learners, num_cpus_per_learner=0.5)
    )


class PeakMemory:
    """Inside, the most memory that is resident in some processes together, in MB, sampled every few milliseconds."""

    def __init__(self, pids: list[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = self._resident()

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _resident(self) -> float:
        return sum(process.memory_info().rss for process in self._processes) / 1e6

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, self._resident())


def measured(update: Callable[[], Any], pids: list[int], before_mb: float) -> dict[str, float]:
    """Least seconds of some updates, and the memory that they took at most above ``before_mb``."""
    with PeakMemory(pids) as memory:
        times = [seconds_of(update) for _ in range(REPEATS)]
    return {"seconds": min(times), "memory_mb": memory.peak - before_mb}


# ---- each quantity in a process of its own ----


def grow_rows(quantity: str, sizes: tuple[int, ...], model_path: str) -> list[dict[str, float]]:
    """One learner in this process; ``sizes`` ascend, because a process keeps what it was given once."""
    torch.set_num_threads(1)
    learner = build_learner(config_of(model_path))
    learner.update(episodes=make_groups(GROUP_SIZE, 1, 16), timesteps={"training_iteration": 1})
    before = psutil.Process().memory_info().rss / 1e6
    points = []
    for size in sizes:
        groups = make_groups(**{**BASE, quantity: size})

        def update(groups: list[TrajectoryGroup] = groups) -> None:
            learner.update(episodes=groups, timesteps={"training_iteration": 1})

        points.append({"size": size, **measured(update, [os.getpid()], before)})
    return points


def grow_learners(sizes: tuple[int, ...], model_path: str) -> list[dict[str, float]]:
    """Learners as Ray actors of one thread each."""
    with local_ray():
        return [measured_learners(size, model_path) for size in sizes]


def measured_learners(num_learners: int, model_path: str) -> dict[str, float]:
    config = config_of(model_path, num_learners)
    spec = config.get_multi_rl_module_spec(spaces=TextEnvRunner.get_spaces(None))
    learners = LearnerGroup(config=config, module_spec=spec)
    groups = make_groups(**{**BASE, "trajectories": 64 * num_learners})
    data = TrainingGroups(episodes_refs=[GroupRefs.put(group) for group in groups])
    pids = [each.get() for each in learners.foreach_learner(lambda learner: os.getpid())]
    before = sum(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6

    def update() -> None:
        for result in learners.update(training_data=data, timesteps={"training_iteration": 1}):
            assert result  # each learner's metrics

    point = {"size": num_learners, **measured(update, pids, before)}
    learners.shutdown()
    return point


def drive(iterations: int, model_path: str) -> list[float]:
    """The driver's resident memory after each iteration, in MB; sampling, update and sync go on in actors."""
    games = {"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 3}
    config = (
        GRPOConfig()
        .environment("trial/ALFWorld-v0", env_config=games)
        .rl_module(model_path=model_path)
        .training(group_size=4, tasks_per_iteration=2, kl_coeff=0.0)
        .env_runners(max_prompt_tokens=512, max_response_tokens=4, prompt_style="plain")
        .engines(engine="transformers", num_cpus_per_engine=0.4)
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.4)
        .learners(num_learners=1, num_cpus_per_learner=0.4)
        .resources(num_cpus_for_main_process=0.4)
        .debugging(seed=0)
    )
    process, resident = psutil.Process(), []
    with local_ray():
        algorithm = config.build_algo()
        try:
            for _ in range(iterations):
                algorithm.train()
                resident.append(process.memory_info().rss / 1e6)
        finally:
            algorithm.stop()
    return resident


def child(part: str, sizes: tuple[int, ...], model_path: str) -> Any:
    """``part`` in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", model_path, "--sizes", *map(str, sizes)]
    began = time.perf_counter()
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def run_part(part: str, sizes: tuple[int, ...], model_path: str) -> Any:
    if part == "driver":
        return drive(sizes[0], model_path)
    return grow_learners(sizes, model_path) if part == "learners" else grow_rows(part, sizes, model_path)


# ---- what comes out ----


def exponent(points: list[dict[str, float]], name: str) -> float:
    """e of the fit ``value ~ size ** e``; NaN where a value is not positive."""
    values = np.array([point[name] for point in points])
    if not (values > 0).all():
        return float("nan")
    return float(np.polyfit(np.log([point["size"] for point in points]), np.log(values), 1)[0])


def growth_measures(quantity: str, points: list[dict[str, float]]) -> list[Measure]:
    sizes = ", ".join(f"{point['size']:g}" for point in points)
    found = []
    for name, unit in (("seconds", "s"), ("memory_mb", "MB")):
        values = ", ".join(f"{point[name]:.3g}" for point in points)
        what = "time" if name == "seconds" else "memory"
        note = f"{values} {unit} at {sizes} {quantity}"
        found.append(
            Measure(
                f"growth of {what} with {quantity}, exponent", exponent(points, name), "", MOST_EXPONENT, "lower", note
            )
        )
    return found


def driver_measure(resident: list[float]) -> Measure:
    """Growth an iteration from a straight line through what was resident; the target is a hundredth of it in 100 iterations."""
    counted = resident[min(UNCOUNTED, len(resident) - 2) :]
    slope = float(np.polyfit(np.arange(len(counted)), counted, 1)[0])
    note = f"MB after each iteration {counted[0]:.1f} to {counted[-1]:.1f}, {slope:+.4f} an iteration"
    percent = 100 * 100 * slope / counted[0]
    return Measure("growth of the driver's memory in 100 iterations", percent, "%", 1.0, "lower", note)


def plot(points: dict[str, list[dict[str, float]]], resident: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for name, axis, label in (("seconds", axes[0], "time of an update"), ("memory_mb", axes[1], "memory of an update")):
        for quantity, line in points.items():
            sizes = np.array([point["size"] for point in line]) / line[0]["size"]
            values = np.array([point[name] for point in line]) / line[0][name]
            axis.plot(sizes, values, marker="o", label=f"{quantity}, {exponent(line, name):.2f}")
        most = max(line[-1]["size"] / line[0]["size"] for line in points.values())
        axis.plot([1, most], [1, most], color="grey", linestyle=":", label="linear, 1")
        axis.set(xscale="log", yscale="log", xlabel="times the smallest amount", ylabel=f"{label}, times the smallest")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(ScalarFormatter())
            side.set_minor_formatter(NullFormatter())
        axis.set_xticks([1, 2, 4, 8])
        axis.set_yticks([1, 2, 4, 8])
        axis.legend(title="amount, exponent", fontsize="small", title_fontsize="small")
        axis.grid(alpha=0.3)
    axes[2].plot(range(1, len(resident) + 1), resident)
    axes[2].set(xlabel="iteration", ylabel="driver's resident memory, MB", ylim=(0, 1.2 * max(resident)))
    axes[2].grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write the growth as a picture (PNG)")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="for the driver's memory")
    parser.add_argument("--part", choices=[*SIZES, "driver"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(run_part(args.part, tuple(args.sizes), args.model)))
        return
    with tempfile.TemporaryDirectory(prefix="bench_growth-") as folder:
        model_path = save_model(Path(folder) / "nano")
        points = {quantity: child(quantity, sizes, model_path) for quantity, sizes in SIZES.items()}
        resident = child("driver", (args.iterations,), model_path)
    measures = [each for quantity, line in points.items() for each in growth_measures(quantity, line)]
    measures.append(driver_measure(resident))
    write_report(args.json, measures, {"points": points, "driver_mb": resident})
    if args.plot:
        plot(points, resident, args.plot)


if __name__ == "__main__":
    main()

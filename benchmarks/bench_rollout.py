"""Rollouts against the engine's own throughput on the same requests, and against a loop that steps all episodes together.

    python benchmarks/bench_rollout.py --json benchmarks/results/rollout.json

One env runner and one engine play an iteration of the quickstart (16 groups of 8). Every response has a seed, so that each
repeat makes the same requests. In turn, and several times, in one process tree: the rollouts themselves; the requests that
they made, offered to the same engine at once; and a lock-step loop, which samples one response for every running episode and
then steps every environment, until all have ended. The last is compared on ALFWorld's official games, too, where a folder
holds them (``--data``, else ``ALFWORLD_DATA``, else ``TRIAL_TEST_DATA``); generated games of the official size stand in. There
the length of each response is drawn from a geometric distribution (a stop token that never comes, and a limit that varies),
because a policy that reasons before it acts writes responses of very unequal length.

The policy is the quickstart's warm start (made once, in three minutes, and cached), or ``--model-path``. Leaves out: several
engines and runners, CUDA. CPU seconds of runner and engine stand beside wall-clock ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import runpy
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch

from trial_ray.algorithms.initial_policy import initial_policy
from trial_ray.inference.pool import EnginePool
from trial_ray.inference.protocol import Response, SamplingParams
from trial_ray.inference.weights import pack_weights
from trial_ray.models.causal_lm_module import load_causal_lm
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.episode import PolicyPlayer, derive_seed
from trial_ray.rollout.requests import GroupRequest, SampleSettings
from trial_ray.rollout.workers import create_engines

QUICKSTART = Path(__file__).parents[1] / "tuned_examples" / "alfworld_quickstart.py"
MODES = ("rollouts", "at_once", "lock_step")


@dataclass(frozen=True)
class Asked:
    """One request that the rollouts made."""

    prompt_ids: np.ndarray
    params: SamplingParams
    request: GroupRequest


class MeasuredRunner(TextEnvRunner):
    """An env runner that notes what it asks for, and can ask in two other ways."""

    mean_tokens: float | None = None
    asked: list[Asked]

    def draw_lengths(self, mean_tokens: float) -> None:
        """From now on a response has a drawn number of tokens, ``mean_tokens`` on average."""
        self.mean_tokens = mean_tokens

    def player(self, request: GroupRequest, settings: SampleSettings, seed: int | None) -> PolicyPlayer:
        player = super().player(request, settings, seed)

        async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
            if self.mean_tokens is not None:
                uniform = random.Random(params.seed).random()
                drawn = 1 + int(np.log1p(-uniform) / np.log1p(-1 / self.mean_tokens))
                params = replace(params, max_tokens=min(params.max_tokens, drawn))
            self.asked.append(Asked(prompt_ids, params, request))
            return await player.generate(prompt_ids, params)

        return replace(player, generate=generate)

    def rollouts(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> tuple[float, int]:
        """Play as in training; returns seconds, and tokens of responses."""
        self.asked = []
        began = time.perf_counter()
        samples, _ = self.sample_groups(requests, settings)
        seconds = time.perf_counter() - began
        errors = [error for sample in samples for error in sample.errors]
        assert not errors, errors[0]
        groups = [group for sample in samples for group in ray.get(sample.ref)]
        tokens = sum(
            len(turn.response_ids) for group in groups for rollout in group.trajectories for turn in rollout.turns
        )
        return seconds, tokens

    def at_once(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> tuple[float, int]:
        """Offer what the last call of :meth:`rollouts` asked for, all of it at the start."""

        async def offer() -> list[Response]:
            return await asyncio.gather(
                *[self.client.generate(asked.prompt_ids, asked.params, asked.request) for asked in self.asked]
            )

        began = time.perf_counter()
        responses = asyncio.run(offer())
        return time.perf_counter() - began, sum(len(response.response_ids) for response in responses)

    def lock_step(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> tuple[float, int]:
        """Play the same rollouts with all episodes in step."""
        self.asked = []
        began = time.perf_counter()
        tokens = asyncio.run(_lock_step(self, requests, settings))
        return time.perf_counter() - began, tokens

    def pid(self) -> int:
        """Of the process."""
        return os.getpid()

    def num_asked(self) -> int:
        """Requests of the last call."""
        return len(self.asked)


async def _lock_step(runner: MeasuredRunner, requests: Sequence[GroupRequest], settings: SampleSettings) -> int:
    episodes, tokens = [], 0
    for request in requests:
        for rollout in range(request.group_size):
            env, free = runner.take_env(request.environment, settings.env_configs[request.environment])
            player = runner.player(request, settings, derive_seed(request.seed, rollout))
            episodes.append([env, free, player, env.reset(request.task_id, request.seed), []])
    running = list(episodes)
    while running:
        decisions = await asyncio.gather(
            *[player.act(now, history, len(history) + 1) for _, _, player, now, history in running]
        )
        for episode, decision in zip(running, decisions, strict=True):
            env, _, _, now, history = episode
            episode[3] = env.step(decision.action)
            history.append((now.observation, decision.action))
            tokens += len(decision.response_ids)
        running = [
            episode
            for episode in running
            if not (episode[3].terminated or episode[3].truncated or len(episode[4]) >= episode[0].max_turns)
        ]
    for env, free, *_ in episodes:
        free.append(env)
    return tokens


def measure(config: Any, args: argparse.Namespace, mean_tokens: float | None, modes: Sequence[str]) -> dict[str, Any]:
    """Medians over the repeats, of which each runs every mode once."""
    pool = create_engines(config)
    runner = ray.remote(MeasuredRunner).options(num_cpus=0.5).remote(config=config, env_creator=None)
    try:
        [info] = pool.start()
        send_weights(config, pool)
        ray.get(runner.connect.remote(pool.handles))
        if mean_tokens is not None:
            ray.get(runner.draw_lengths.remote(mean_tokens))
        processes = {"engine": psutil.Process(info["pid"]), "runner": psutil.Process(ray.get(runner.pid.remote()))}
        runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
        requests, settings = iteration(config, args)
        for repeat in range(args.repeats + 1):  # the first warms up: games, tokenizer, kernels
            for mode in modes:
                run = timed(runner, mode, requests, settings, processes)
                if repeat:
                    runs[mode].append(run)
    finally:
        ray.kill(runner)
        pool.stop()
    made = {(run["requests"], run["response_tokens"]) for mode in modes for run in runs[mode]}
    return {
        "same_requests": len(made) == 1,
        **{
            mode: {key: round(statistics.median(run[key] for run in runs[mode]), 4) for key in runs[mode][0]}
            for mode in modes
        },
        "seconds": {mode: [round(run["seconds"], 3) for run in runs[mode]] for mode in modes},
    }


def timed(
    runner: Any, mode: str, requests: Any, settings: Any, processes: dict[str, psutil.Process]
) -> dict[str, float]:
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    seconds, tokens = ray.get(getattr(runner, mode).remote(requests, settings))
    cpu = {f"{name}_cpu_s": cpu_seconds(process) - before[name] for name, process in processes.items()}
    return {"seconds": seconds, "requests": ray.get(runner.num_asked.remote()), "response_tokens": tokens, **cpu}


def iteration(config: Any, args: argparse.Namespace) -> tuple[list[GroupRequest], SampleSettings]:
    [entry] = config.environment_entries()
    tasks = entry.tasks()
    chosen = [tasks[index * len(tasks) // args.groups] for index in range(args.groups)]
    settings = SampleSettings(
        env_configs=(dict(entry.config),),
        params=SamplingParams(config.max_response_tokens),
        iteration=0,
        keep_trajectories=True,
        seeded=True,
    )
    return [GroupRequest(index, task, config.group_size, seed=index) for index, task in enumerate(chosen)], settings


def send_weights(config: Any, pool: EnginePool) -> None:
    model = load_causal_lm(str(config.model_path), config.model_dtype)
    pool.sync(pack_weights(model.named_parameters(), 0, dtype=getattr(torch, config.engine_dtype())))


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-path", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    base = runpy.run_path(str(QUICKSTART))["config"]
    model_path = args.model_path or initial_policy(base)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        results = []
        for engine in args.engines:
            config = base.copy(copy_frozen=False).policy(model_path=model_path, warm_start=None).engines(engine=engine)
            result = {"engine": engine, "games": "quickstart", **measure(config, args, None, MODES)}
            result["of_at_once"] = round(result["at_once"]["seconds"] / result["rollouts"]["seconds"], 3)
            result["over_lock_step"] = round(result["lock_step"]["seconds"] / result["rollouts"]["seconds"], 3)
            results.append(result)
            print(json.dumps(result, indent=1), flush=True)
        ray.shutdown()
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "model_path")}
    record = {"settings": settings, "cores": os.cpu_count(), "load_average": os.getloadavg()[0], "results": results}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

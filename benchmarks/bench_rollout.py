"""Speed of rollouts against the engine's own throughput on the same requests, and against a loop in lock-step.

    python benchmarks/bench_rollout.py --json benchmarks/results/rollout.json

One env runner and one engine play two workloads, and every response has a seed, so that each repeat makes the same requests.
Three modes are measured in turn, several times, in the same processes: the rollouts; all requests of these rollouts, sent to the
engine at once; and a lock-step loop, which alternates between sampling one response for every running episode and stepping every
environment, until all episodes have ended.

- **quickstart**: 16 groups of 8 rollouts in the quickstart's games, played by the quickstart's initial policy, or by
  ``--model-path``. Responses have about 5 tokens, few more than 8.
- **official**: 8 groups of 8 rollouts in ALFWorld's official games (``--data``, else ``ALFWORLD_DATA``, else
  ``TRIAL_TEST_DATA``), or in generated games of the official size if no folder has them. As for a policy that reasons before it
  acts, response lengths are unequal: they are drawn from a geometric distribution, 24 tokens on average, 128 at most. The model
  is untrained and of the quickstart's size; actions are drawn from the admissible ones.

``bound`` is an upper bound of the ratio of rollouts to the engine's throughput: every token of the longest episode needs an engine
step, even if few other episodes are running. The fixed cost of a step is estimated from the lock-step loop, which needs many more
steps for the same tokens. Several engines or env runners and CUDA are not measured. CPU seconds of env runner and engine are
reported next to wall-clock seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import ray
import torch
from measure import Measure, cpu_seconds, games_config, official_games, ray_cluster, report_parser, write_report
from rollouts import QUICKSTART

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.guarded import StepResult
from trial_ray.algorithms.startup import initial_policy
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.engines.weights import pack_weights
from trial_ray.models.loading import load_causal_lm
from trial_ray.models.tensors import engine_tensors
from trial_ray.models.tiny import build_tiny_model, build_tokenizer
from trial_ray.process import STEP, process_events
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.episode import History, PolicyPlayer, derive_seed
from trial_ray.rollout.groups import GroupRequest, SampleSettings
from trial_ray.rollout.runner_group import TextEnvRunnerGroup
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import Turn

WORKLOADS = ("quickstart", "official")
MODES = ("rollouts", "at_once", "lock_step")


class DrawnPlayer:
    """A policy player whose actions are drawn from the admissible ones, because an untrained model writes no valid action."""

    def __init__(self, player: PolicyPlayer) -> None:
        self._player = player

    async def act(self, result: StepResult, history: History, step: int) -> Turn:
        decision = await self._player.act(result, history, step)
        drawn = random.Random(derive_seed(self._player.seed or 0, step)).choice(sorted(result.admissible_actions))
        return replace(decision, action=drawn)


class MeasuredRunner(TextEnvRunner):
    """An env runner that records its requests and can send them in two other ways.

    Attributes:
        mean_tokens: mean of the responses' maximum numbers of tokens, which are drawn like the actions; with ``None``, nothing is
            drawn.
        requests: arguments of the client's ``generate`` for each response of the last call of :meth:`rollouts` or
            :meth:`lock_step`.
        longest: number of response tokens of the longest episode in the last call of :meth:`rollouts`.
    """

    mean_tokens: float | None = None
    requests: list[tuple[np.ndarray, SamplingParams, GroupRequest]]
    longest = 0

    def start(self, engines: Any, mean_tokens: float | None) -> int:
        """Connect to the engines; return the id of this process."""
        self.connect(engines)
        self.mean_tokens = mean_tokens
        return os.getpid()

    def player(self, request: GroupRequest, settings: SampleSettings, seed: int | None) -> Any:
        plain = super().player(request, settings, seed)

        async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
            if self.mean_tokens is not None:
                uniform = random.Random(params.seed).random()
                drawn = 1 + int(np.log1p(-uniform) / np.log1p(-1 / self.mean_tokens))
                params = replace(params, max_tokens=min(params.max_tokens, drawn))
            self.requests.append((prompt_ids, params, request))
            return await plain.generate(prompt_ids, params)

        player = replace(plain, generate=generate)
        return player if self.mean_tokens is None else DrawnPlayer(player)

    async def run(self, mode: str, requests: Sequence[GroupRequest], settings: SampleSettings) -> dict[str, float]:
        """Run the method ``mode``; return the seconds, and the numbers of requests and response tokens."""
        if mode != "at_once":
            self.requests = []
        began = time.perf_counter()
        tokens = await getattr(self, mode)(requests, settings)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "requests": len(self.requests), "response_tokens": tokens}

    def longest_episode(self) -> int:
        """Return the attribute ``longest``."""
        return self.longest

    async def rollouts(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> int:
        """Play as in training; return the number of response tokens."""
        played = await asyncio.gather(*[self.play_group(request, settings) for request in requests])
        samples, groups = zip(*played, strict=True)
        errors = [error for sample in samples for error in sample.errors]
        assert not errors, errors[0]
        lengths = [
            sum(len(turn.response_ids) for turn in rollout.turns) for group in groups for rollout in group.trajectories
        ]
        self.longest = max(lengths)
        return sum(lengths)

    async def at_once(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> int:
        """Send the recorded requests all at once; return the number of response tokens."""
        responses = await asyncio.gather(*[self.client.generate(*recorded) for recorded in self.requests])
        return sum(len(response.response_ids) for response in responses)

    async def lock_step(self, requests: Sequence[GroupRequest], settings: SampleSettings) -> int:
        """Play the same rollouts in lock-step; return the number of response tokens."""
        episodes, tokens = [], 0
        for request in requests:
            for rollout in range(request.group_size):
                env, free = self.pop_env(request.environment, settings.env_configs[request.environment])
                player = self.player(request, settings, derive_seed(request.seed, rollout))
                episodes.append([env, free, player, env.reset(request.task_id, request.seed), []])
        running = list(episodes)
        while running:
            decisions = await asyncio.gather(
                *[player.act(now, history, len(history) + 1) for _, _, player, now, history in running]
            )
            for episode, decision in zip(running, decisions, strict=True):
                env, _, _, now, history = episode
                episode[3] = env.step(decision.action)
                history.append(replace(decision, observation=now.observation))
                tokens += len(decision.response_ids)
            running = [
                episode
                for episode in running
                if not (episode[3].terminated or episode[3].truncated or len(episode[4]) >= episode[0].max_turns)
            ]
        for env, free, *_ in episodes:
            free.append(env)
        return tokens


def measure(config: Any, num_groups: int, mean_tokens: float | None, repeats: int) -> dict[str, Any]:
    """Return medians over the repeats, which run every mode once, and ratios of times within a repeat."""
    pool = EnginePool(**config.engine_pool_arguments())
    groups = TextEnvRunnerGroup.concurrency_groups
    runner = ray.remote(num_cpus=0.5, concurrency_groups=groups)(MeasuredRunner).remote(config=config, env_creator=None)
    try:
        [info] = pool.start()
        send_weights(config, pool)
        pid = ray.get(runner.start.remote(pool.handles, mean_tokens))
        processes = {"engine": psutil.Process(info["pid"]), "runner": psutil.Process(pid)}
        requests, settings = iteration(config, num_groups)
        rounds = []
        for _ in range(repeats + 1):  # the first warms up: games, tokenizer, kernels
            rounds.append({mode: timed(runner, pool, mode, requests, settings, processes) for mode in MODES})
        longest = ray.get(runner.longest_episode.remote())
    finally:
        ray.kill(runner)
        pool.stop()
    rounds = rounds[1:]
    made = {(run["requests"], run["response_tokens"]) for repeat in rounds for run in repeat.values()}
    seconds = {mode: [repeat[mode]["seconds"] for repeat in rounds] for mode in MODES}
    medians = {
        mode: {key: round(statistics.median(r[mode][key] for r in rounds), 3) for key in rounds[0][mode]}
        for mode in MODES
    }
    return {
        "same_requests": len(made) == 1,
        "of_at_once": round(ratio(seconds["at_once"], seconds["rollouts"]), 3),
        "over_lock_step": round(ratio(seconds["lock_step"], seconds["rollouts"]), 3),
        "bound": round(bound(medians, longest), 3),
        "longest_episode_tokens": longest,
        **medians,
        "seconds": {mode: [round(value, 3) for value in values] for mode, values in seconds.items()},
    }


def bound(medians: dict[str, dict[str, float]], longest: int) -> float:
    """Return the engine's CPU seconds for all requests at once, over its CPU seconds with at least ``longest`` steps."""
    once, lock_step = medians["at_once"], medians["lock_step"]
    further = lock_step["engine_steps"] - once["engine_steps"]
    per_step = max(0.0, lock_step["engine_cpu_s"] - once["engine_cpu_s"]) / further if further > 0 else 0.0
    least = once["engine_cpu_s"] + per_step * max(0.0, longest - once["engine_steps"])
    return once["engine_cpu_s"] / least


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios within each repeat, because other processes on the machine slow both sides of a ratio."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def timed(
    runner: Any, pool: EnginePool, mode: str, requests: Any, settings: Any, processes: dict[str, psutil.Process]
) -> dict[str, float]:
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    began = time.time()
    figures = ray.get(runner.run.remote(mode, requests, settings))
    cpu = {f"{name}_cpu_s": cpu_seconds(process) - before[name] for name, process in processes.items()}
    events = ray.get(pool.handles[0].__ray_call__.remote(lambda _: process_events(began))).events
    return {**figures, "engine_steps": sum(event.name == STEP for event in events), **cpu}


def iteration(config: Any, num_groups: int) -> tuple[list[GroupRequest], SampleSettings]:
    [entry] = config.environment_entries()
    tasks = entry.tasks()
    chosen = [tasks[index * len(tasks) // num_groups] for index in range(num_groups)]
    settings = SampleSettings(
        env_configs=(dict(entry.config),),
        params=SamplingParams(config.max_response_tokens),
        seeded=True,
    )
    return [GroupRequest(index, task, config.group_size, seed=index) for index, task in enumerate(chosen)], settings


def send_weights(config: Any, pool: EnginePool) -> None:
    model = load_causal_lm(str(config.model_path), config.model_dtype)
    pool.sync(pack_weights(engine_tensors(model, getattr(torch, config.engine_dtype())), 0))


def quickstart(model_path: str | None) -> Any:
    """Return the config of the quickstart."""
    config = load_experiment(QUICKSTART).config
    return config.rl_module(model_path=model_path or initial_policy(config))


def official(folder: str, data: str | None, turns: int) -> Any:
    """Return a config of ALFWorld's official games, or generated ones of their size, with an untrained model."""
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    build_tiny_model(tokenizer, "mini").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    games = {**games_config(data, "valid_seen", 64), "max_turns": turns}
    config = load_experiment(QUICKSTART).config.environment("trial/ALFWorld-v0", env_config=games)
    config.rl_module(model_path=folder, warm_start=None)
    return config.env_runners(max_prompt_tokens=1024, max_response_tokens=128, history_window=2)


def main() -> None:
    parser = report_parser(__doc__)
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--games", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3, help="of the quickstart's games")
    parser.add_argument("--official-repeats", type=int, default=2, help="of official games")
    parser.add_argument("--turns", type=int, default=12, help="most turns of an official game")
    parser.add_argument("--mean-tokens", type=float, default=24.0, help="of a response in official games")
    parser.add_argument("--model-path", help="policy of the quickstart's games")
    parser.add_argument("--data", default=official_games(), help="folder of the official games")
    args = parser.parse_args()
    with ray_cluster(2) as folder:
        workloads = {
            "quickstart": lambda: (quickstart(args.model_path), 16, None),
            "official": lambda: (official(f"{folder}/model", args.data, args.turns), 8, args.mean_tokens),
        }
        results = []
        for games in args.games:
            config, num_groups, mean_tokens = workloads[games]()
            for engine in args.engines:
                config = config.copy(copy_frozen=False).engines(engine=engine)
                repeats = args.repeats if games == "quickstart" else args.official_repeats
                results.append({"engine": engine, "games": games, **measure(config, num_groups, mean_tokens, repeats)})
    settings = {name: getattr(args, name) for name in ("repeats", "official_repeats", "turns", "mean_tokens")}
    settings["official_games"] = args.data is not None
    write_report(args.json, measures(results), {"settings": settings, "results": results})


def measures(results: list[dict[str, Any]]) -> list[Measure]:
    """Return the measures for the table of all benchmarks."""
    found = []
    for each in results:
        where = f"{each['engine']} engine, {each['games']} games"
        seconds = {mode: each[mode]["seconds"] for mode in MODES}
        note = ", ".join(f"{mode.replace('_', ' ')} {value:.2f} s" for mode, value in seconds.items())
        note += f"; bound {each['bound']:.2f}, by the longest episode"
        found.append(
            Measure(f"rollouts against the engine's own throughput, {where}", each["of_at_once"], target=0.9, note=note)
        )
        target = 1.8 if each["games"] == "official" else None
        found.append(Measure(f"rollouts against a lock-step loop, {where}", each["over_lock_step"], target=target))
    return found


if __name__ == "__main__":
    main()

"""Whole iterations on a GPU: engine and learner that share it, and an iteration of TRIAL in ALFWorld."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_models import QWEN3, SMOLLM2, Setup
from local_ray import local_ray
from measure import Measure

from trial_ray import TRIALConfig
from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer

ROUNDS = 5


def run_config(setup: Setup, model_path: str, tasks: int) -> TRIALConfig:
    """TRIAL with engine and learner on one device, vLLM where it is installed."""
    vllm = setup.cuda and importlib.util.find_spec("vllm") is not None
    kwargs: dict[str, Any] = {"max_batch": 8 if setup.small else 128}
    if vllm:
        kwargs |= {"gpu_memory_utilization": 0.5}
    elif setup.cuda:
        kwargs |= {"device": "cuda", "dtype": "bfloat16"}
    share = 0.5 if setup.cuda else 0
    games = {"split": "generated", "difficulty": "tiny", "num_games": 64, "max_turns": 2 if setup.small else 12}
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config=games)
        .rl_module(model_path=model_path)
        .training(group_size=2 if setup.small else 8, tasks_per_iteration=tasks, kl_coeff=0.0, max_logprob_gap=1e9)
        .env_runners(max_prompt_tokens=512, max_response_tokens=4 if setup.small else 64, prompt_style="plain")
        .engines(
            engine="vllm" if vllm else "transformers",
            colocate=True,
            num_cpus_per_engine=0.5,
            num_gpus_per_engine=share,
            engine_kwargs=kwargs,
        )
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)
        .learners(num_learners=1, num_cpus_per_learner=0.5, num_gpus_per_learner=share)
        .resources(num_cpus_for_main_process=0.5)
        .debugging(seed=0)
    )


@contextmanager
def running(setup: Setup, name: str, tasks: int) -> Iterator[Any]:
    """The built algorithm with a model of random weights, whose vocabulary is that of ALFWorld's words."""
    with tempfile.TemporaryDirectory(prefix="gpu_run-") as folder:
        vocabulary = len(build_tokenizer(ADAPTER.warm_start.vocabulary))
        path = setup.save_model(Path(folder) / "model", name, vocab_size=vocabulary)
        if setup.cuda:
            torch.cuda.empty_cache()
        with local_ray(num_cpus=4):
            algorithm = run_config(setup, path, tasks).build_algo()
            try:
                yield algorithm
            finally:
                algorithm.stop()


def colocate(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """Each stage between sampling and the next sampling, by itself; the engine's answers are checked by checksum."""
    seconds: dict[str, list[float]] = {}
    with running(setup, SMOLLM2 if setup.small else QWEN3, tasks=2) as algorithm:
        pool, level = algorithm.engine_pool, algorithm.config.sleep_level
        backend, engine = algorithm.config.transfer_backend(), algorithm.config.engine
        for name in ("sleep", "wake", "sync"):
            setattr(pool, name, timed(getattr(pool, name), name, seconds))
        memory: dict[str, float] = {"awake": device_gb(setup)}
        for version in range(1, (1 if setup.small else ROUNDS) + 1):
            algorithm.weight_sync.make_room()
            memory["asleep"] = device_gb(setup)
            algorithm.weight_sync.send(1000 + version)
    names = {"sleep": f"falling asleep, level {level}", "sync": f"weights by {backend}"}
    names |= {"wake weights": "waking the weights", "wake cache": "waking the cache"}
    held = f"device memory {memory['awake']:.1f} GB awake, {memory['asleep']:.1f} GB asleep"
    measures = [
        Measure(
            f"{engine} engine beside a learner: {names[key]}", min(values), "s", note=held if key == "sleep" else ""
        )
        for key, values in seconds.items()
    ]
    return measures, {"seconds": seconds, "memory_gb": memory, "engine": engine, "transfer": backend}


def timed(function: Callable[..., Any], name: str, seconds: dict[str, list[float]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        key = f"{name} {args[0]}" if name == "wake" else name
        began = time.perf_counter()
        result = function(*args, **kwargs)
        seconds.setdefault(key, []).append(time.perf_counter() - began)
        return result

    return call


def device_gb(setup: Setup) -> float:
    """Memory of the device that any process holds."""
    if not setup.cuda:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def iteration(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """The second iteration: the first compiles."""
    with running(setup, SMOLLM2, tasks=2 if setup.small else 16) as algorithm:
        algorithm.train()
        began = time.perf_counter()
        result = algorithm.train()
        seconds = time.perf_counter() - began
        engine = algorithm.config.engine
    phases = {name: float(value) for name, value in result["seconds"].items()}
    rows = int(result["rows"]["given_to_learners"])
    shares = ", ".join(f"{name} {value:.2f} s" for name, value in sorted(phases.items(), key=lambda item: -item[1]))
    measure = Measure(
        f"an iteration of TRIAL in ALFWorld, {SMOLLM2}'s layers, {engine}",
        seconds,
        "s",
        note=f"{rows:,} rows; {shares}",
    )
    return [measure], {"seconds": seconds, "phases": phases, "rows": rows}

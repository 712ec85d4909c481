"""One iteration at the size of published runs, its seconds and peak memory by phase; models have random weights."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_models import QWEN2_5, QWEN3, Setup
from local_ray import local_ray
from measure import Measure
from phase_memory import PhaseMeter

from trial_ray.algorithms.weight_sync import ask_learners
from trial_ray.metrics import LEARNER
from trial_ray.planning.step_time import RESPONSE_SHARE
from trial_ray.runs.metric_files import flatten
from trial_ray.user_files import run_user_file

ONE_GPU = Path(__file__).parents[1] / "tuned_examples" / "alfworld_qwen3_1.7b_1gpu.py"
NUM_GAMES = 64
FULL_TASKS, FULL_TURNS = 16, 50


def one_gpu_config(setup: Setup, model_path: str, tasks: int, turns: int, response_tokens: int | None = None) -> Any:
    """The example for one GPU, in generated games and with this model, from its first iteration on with hindsight.

    Args:
        setup: on the CPU the engine is transformers', and sizes are the smallest where asked for.
        model_path: folder of the model.
        tasks: of an iteration, each played by 8 rollouts.
        turns: of an episode at most; random weights win no game, so all of them are played.
        response_tokens: of each response, since random weights do not end one; ``None``: the example's limit.
    """
    config = run_user_file(ONE_GPU, "one_gpu_example")["config"].copy(copy_frozen=False)
    games = {"split": "generated", "difficulty": "official", "num_games": NUM_GAMES, "max_turns": turns}
    config.environment(env_config=games).rl_module(model_path=model_path)
    config.training(tasks_per_iteration=tasks, hindsight_start_iteration=1, max_logprob_gap=1e9)
    config.evaluation(evaluation_split=None, evaluation_interval=None).debugging(seed=0)
    if response_tokens is not None:
        config.env_runners(max_response_tokens=response_tokens)
    if not setup.cuda:
        config.engines(engine="transformers", num_gpus_per_engine=0, num_cpus_per_engine=0.5, engine_kwargs={})
        config.learners(num_gpus_per_learner=0, num_cpus_per_learner=0.5).resources(num_cpus_for_main_process=0.5)
        config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)
    elif importlib.util.find_spec("vllm") is None:
        kwargs = {"device": "cuda", "dtype": "bfloat16", "max_batch": 128}
        config.engines(engine="transformers", engine_kwargs=kwargs)
    if setup.small:
        config.training(group_size=2).env_runners(max_prompt_tokens=1024, max_response_tokens=4)
    return config


@contextmanager
def running(setup: Setup, shape: str, tasks: int, turns: int, response_tokens: int | None = None) -> Iterator[Any]:
    """The built algorithm. The model has its real vocabulary, most of whose tokens are no text: prompts stay as long as games
    make them."""
    if setup.small:
        tasks, turns = 2, 2
    with tempfile.TemporaryDirectory(prefix="gpu_step-") as folder:
        path = setup.save_model(Path(folder) / "model", shape)
        if setup.cuda:
            torch.cuda.empty_cache()
        with local_ray(num_cpus=8 if setup.cuda else 4):
            algorithm = one_gpu_config(setup, path, tasks, turns, response_tokens).build_algo()
            try:
                yield algorithm
            finally:
                algorithm.stop()


def measured_iteration(algorithm: Any, progress: Path | None) -> dict[str, Any]:
    """One iteration's seconds by phase, peak memory by phase, rows and tokens.

    Seconds are the driver's but for ``scoring``, which the learner's clock takes out of the driver's ``update``. Memory is of
    :class:`PhaseMeter`.
    """

    def install(learner: Any) -> None:
        learner.phase_meter = PhaseMeter(learner, progress)

    ask_learners(algorithm.learner_group, install)
    result = algorithm.train()
    [memory] = ask_learners(algorithm.learner_group, lambda learner: learner.phase_meter.finish())
    metrics, clock = flatten(result), {name: float(value) for name, value in result["seconds"].items()}
    scoring = metrics[f"{LEARNER}scoring/seconds"]
    seconds = {
        "sampling": clock["sampling"],
        "scoring": scoring,
        "update": clock["update"] - scoring,
        "sync": clock["sync"],
    }
    config, shown = algorithm.config, ("tokens_forwarded", "tokens_distinct")
    return {
        "seconds": seconds,
        "step_seconds": sum(seconds.values()),
        "memory": memory,
        "rows": int(result["rows"]["given_to_learners"]),
        "prompt_tokens": metrics["env_runners/num_prompt_tokens"],
        "response_tokens": metrics["env_runners/num_response_tokens"],
        "turns_mean": metrics["env_runners/episode_len_mean"],
        "logprob_gap": metrics.get(f"{LEARNER}engine/logprob_gap"),
        **{f"{phase}_{name}": metrics[f"{LEARNER}{phase}/{name}"] for phase in ("scoring", "update") for name in shown},
        "settings": {
            "engine": config.engine,
            "tasks": config.tasks_per_iteration,
            "rollouts": config.group_size,
            "max_turns": config.env_config["max_turns"],
            "max_prompt_tokens": config.max_prompt_tokens,
            "max_response_tokens": config.max_response_tokens,
        },
        "actors": algorithm.actor_reports(),
    }


def example(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """Peak memory by phase of the example for one GPU, with responses of full length.

    Packs and caches have the sizes of a whole iteration; a quarter of its tasks and 8 of its 50 turns reach them.
    """
    with running(setup, QWEN3, tasks=FULL_TASKS // 4, turns=8) as algorithm:
        details = measured_iteration(algorithm, setup.progress)
    kind = "device_peak" if setup.cuda else "host_peak"
    measures = [
        Measure(f"example for one GPU: peak memory, {phase}", peaks[kind] / 2**30, "GiB", note=peaks_note(peaks))
        for phase, peaks in details["memory"].items()
        if peaks[kind] is not None
    ]
    return measures, details


def peaks_note(peaks: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.removesuffix('_peak')} {value / 2**30:.1f} GiB"
        for name, value in peaks.items()
        if name.endswith("_peak") and value is not None
    )


def step_warm_up(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """The same model for a moment: kernels that are compiled now are read from the caches by :func:`step`."""
    with running(setup, QWEN2_5, tasks=2, turns=3, response_tokens=step_response_tokens()) as algorithm:
        return [], measured_iteration(algorithm, setup.progress)


def step(setup: Setup) -> tuple[list[Measure], dict[str, Any]]:
    """A step of TRIAL as published ones are: 16 tasks × 8 rollouts × 50 turns, seconds by phase.

    Responses have the mean length that ``trial-ray plan`` assumes.
    """
    with running(setup, QWEN2_5, FULL_TASKS, FULL_TURNS, step_response_tokens()) as algorithm:
        details = measured_iteration(algorithm, setup.progress)
    settings = details["settings"]
    size = f"{settings['tasks']} × {settings['rollouts']} × {settings['max_turns']}"
    shares = ", ".join(f"{name} {value:.1f} s" for name, value in details["seconds"].items())
    note = f"{details['rows']:,} rows; {shares}"
    return [
        Measure(f"a step of TRIAL in ALFWorld, {QWEN2_5}'s shape, {size}", details["step_seconds"], "s", note=note)
    ], details


def step_response_tokens() -> int:
    return round(RESPONSE_SHARE * run_user_file(ONE_GPU, "one_gpu_example")["config"].max_response_tokens)

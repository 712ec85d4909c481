"""One GRPO iteration of an untrained model with two remote env runners, for ``tests/peers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_run import with_small_actors

from trial_ray.algorithms import GRPOConfig
from trial_ray.rollout.recording import read_turns


def train_once(
    env_id: str, env_config: dict[str, Any], model_path: str, folder: Path, **training: Any
) -> tuple[dict[str, Any], list[str]]:
    """The iteration's results with further settings of its ``training``, and the tasks that were played."""
    config = (
        with_small_actors(GRPOConfig())
        .environment(env_id, env_config=env_config)
        .rl_module(model_path=model_path)
        .training(lr=1e-3, group_size=2, tasks_per_iteration=4, minibatch_rows=8, microbatch_rows=4, kl_coeff=0.0)
        .training(**training)
        .env_runners(max_prompt_tokens=1024, max_response_tokens=8, prompt_style="plain")
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.25)
        .evaluation(evaluation_split="test", evaluation_num_tasks=2)
        .recording(trajectories_folder=str(folder))
    )
    algo = config.build_algo()
    try:
        results = algo.train()
    finally:
        algo.stop()
    return results, sorted(set(read_turns(folder)["task_id"].to_pylist()))

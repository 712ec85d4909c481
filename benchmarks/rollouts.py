"""Rollouts in this process, without actors: groups of any player, and the rows for measuring updates.

These rows are one iteration of the quickstart, sampled once and kept in the user's cache. The initial policy of the quickstart
plays the groups of the first iteration: 16 games with 8 rollouts each, about 1,200 rows of 80 tokens.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import trial_ray.trajectory
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.algorithms.startup import initial_policy
from trial_ray.algorithms.tasks import TaskSampler
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transformers import LocalEngine
from trial_ray.files import content_key, files_digest, get_or_build
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.prompts.styles import prompt_writer
from trial_ray.rollout.episode import Player, PolicyPlayer, derive_seed, play_episode
from trial_ray.rollout.groups import GroupRequest
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import Trajectory, TrajectoryGroup

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
QUICKSTART = EXAMPLES / "alfworld_quickstart.py"


def play_groups(config: Any, player: Callable[[int], Player]) -> list[TrajectoryGroup]:
    """Play the tasks of the config's first iteration.

    Args:
        config: config with one environment.
        player: returns a new player for a rollout with a seed.
    """
    (entry,) = config.environment_entries()
    requests = TaskSampler([entry.tasks()], config.seed or 0).draw(config.tasks_per_iteration, config.group_size)

    async def rollout(request: GroupRequest, index: int) -> Trajectory:
        seed = derive_seed(request.seed, index)
        with closing(GuardedEnv(entry)) as env:
            return await play_episode(env, request.task_id, player(seed), env_seed=request.seed, seed=seed)

    async def group(request: GroupRequest) -> TrajectoryGroup:
        rollouts = [rollout(request, index) for index in range(request.group_size)]
        return TrajectoryGroup(request.task_id, list(await asyncio.gather(*rollouts)))

    async def groups() -> list[TrajectoryGroup]:
        return list(await asyncio.gather(*map(group, requests)))

    return asyncio.run(groups())


def quickstart_config() -> Any:
    """Return a new config of the quickstart, with smaller minibatches and microbatches."""
    config = load_experiment(QUICKSTART).config
    return config.training(tasks_per_iteration=16, minibatch_rows=256, microbatch_rows=64)


def quickstart_groups() -> tuple[str, list[TrajectoryGroup]]:
    """Return the folder of the quickstart's initial policy, and the first groups in task order, from the cache if possible."""
    config = quickstart_config()
    model_path = initial_policy(config)
    config.rl_module(model_path=model_path)
    code = [QUICKSTART, Path(str(trial_ray.trajectory.__file__))]
    model = [path for path in Path(model_path).iterdir() if path.suffix in (".json", ".safetensors")]
    key = content_key({"code": files_digest(code), "model": files_digest(model)})

    def build(folder: Path) -> None:
        (folder / "groups.pickle").write_bytes(pickle.dumps(_sample(config)))

    folder, _ = get_or_build("bench", key, build)
    # The pickle is trusted, because this function wrote it into the user's own cache.
    return model_path, pickle.loads((folder / "groups.pickle").read_bytes())


def _sample(config: Any) -> list[TrajectoryGroup]:
    """Play the first iteration's tasks with the prompts of a run."""
    (entry,) = config.environment_entries()
    tokenizer = load_tokenizer(config.model_path)
    engine = LocalEngine(load_causal_lm(config.model_path, "float32").eval(), frozenset([tokenizer.eos_token_id]))
    prompts = prompt_writer(tokenizer, config, entry.adapter)
    params = SamplingParams(config.max_response_tokens, config.temperature)
    return play_groups(config, lambda seed: PolicyPlayer(prompts, params, engine.generate, seed))

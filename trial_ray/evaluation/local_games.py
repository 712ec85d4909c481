"""Plays tasks with a model in this process, without Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedModel

from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.transformers import LocalEngine
from trial_ray.errors import InfrastructureError
from trial_ray.models.model_shape import stop_tokens_of
from trial_ray.process import run_in_event_loop
from trial_ray.prompts.writer import PromptWriter
from trial_ray.rollout.episode import Player, PolicyPlayer, derive_seed, play_episode
from trial_ray.trajectory import Trajectory

_log = logging.getLogger(__name__)

WrapPlayer = Callable[[str, Player, GuardedEnv], Player]
"""Function that returns the player of an episode, given the task's id, the policy's player and the environment."""
IN_FLIGHT = 64
"""Maximum number of episodes that are played at the same time."""


@dataclass(eq=False, repr=False)
class LocalGames:
    """Plays tasks repeatedly with a model; environments stay loaded until the context manager exits.

    Attributes:
        entry: the environment.
        tasks: ids of the tasks to play.
        params: sampling parameters of responses.
        seed: seed that, together with the task and the turn, determines the seed of each response.
        model: the model that plays.
        tokenizer: the model's tokenizer.
        writer: writes the prompts.
    """

    entry: EnvironmentEntry
    tasks: Sequence[str]
    params: SamplingParams
    seed: int
    model: PreTrainedModel
    tokenizer: Any
    writer: PromptWriter

    def __post_init__(self) -> None:
        self._envs = [GuardedEnv(self.entry) for _ in range(min(len(self.tasks), IN_FLIGHT))]

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def play(self, wrap: WrapPlayer | None = None) -> list[Trajectory]:
        """Play each task once, and return the trajectories that were not ended by an infrastructure error.

        The same weights, seed and number of threads give the same trajectories.

        Args:
            wrap: function that creates the player of each episode; ``None`` lets the model play.

        Raises:
            InfrastructureError: the environment or the engine failed in every episode. If only some failed, a warning is logged.
        """
        training = [module for module in self.model.modules() if module.training]
        try:
            model = self.model.eval()
            ends = stop_tokens_of(model.config, model.generation_config, self.tokenizer)
            engine = LocalEngine(model, frozenset(ends))
            with asyncio.Runner() as loop:
                trajectories = run_in_event_loop(loop, self._play_all(engine, wrap))
        finally:
            for module in training:  # Restore training mode, which gradient checkpointing needs.
                module.training = True
        completed = [trajectory for trajectory in trajectories if not trajectory.failed]
        if errors := [trajectory.error for trajectory in trajectories if trajectory.failed]:
            message = f"{len(errors)} of {len(trajectories)} held-out games failed; the first: {errors[0]}"
            if not completed:
                raise InfrastructureError(message)
            _log.warning("%s. They are not counted.", message)
        return completed

    async def _play_all(self, engine: LocalEngine, wrap: WrapPlayer | None) -> list[Trajectory]:
        idle = asyncio.Queue[GuardedEnv]()
        for env in self._envs:
            idle.put_nowait(env)

        async def play(task: str) -> Trajectory:
            env = await idle.get()
            player: Player = PolicyPlayer(self.writer, self.params, engine.generate, derive_seed(self.seed, task))
            trajectory = await play_episode(env, task, wrap(task, player, env) if wrap else player)
            if env.faulty:
                env.close()  # The next reset creates the environment again.
                env.faulty = False
            idle.put_nowait(env)
            return trajectory

        return await asyncio.gather(*map(play, self.tasks))

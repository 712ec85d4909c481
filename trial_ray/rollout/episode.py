"""One episode: prompt, response, action, answer, until the environment or a limit ends it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from trial_ray.errors import EngineError, EnvironmentFaultError, PromptTooLongError
from trial_ray.inference.protocol import Response, SamplingParams
from trial_ray.rollout.guarded_env import GuardedEnv
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.rollout.trajectory import Trajectory, Turn

Generate = Callable[[np.ndarray, SamplingParams], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """What every episode of a runner shares.

    Attributes:
        prompts: writes prompts for the policy's tokenizer.
        decode: response ids to text, special tokens left out.
        params: how responses are sampled; a seed in it is replaced turn by turn.
        seeded: whether every request gets a seed of its own, derived from the episode's.
    """

    prompts: PromptBuilder
    decode: Callable[[np.ndarray], str]
    params: SamplingParams
    seeded: bool

    async def play(self, env: GuardedEnv, task_id: str, env_seed: int, seed: int, generate: Generate) -> Trajectory:
        """Play one episode; an error of engine or environment ends it as ``failed`` and is kept in ``error``.

        Args:
            env: a text environment, free for this episode; afterwards ``faulty`` if the error was its own.
            task_id: task to reset to.
            env_seed: seed of the environment, the same for all rollouts of a group.
            seed: seed of this rollout's sampling.
            generate: coroutine that samples a response.
        """
        trajectory = Trajectory(task_id=task_id, family="", seed=seed)
        try:
            await self._play(env, trajectory, env_seed, generate)
        except (EngineError, EnvironmentFaultError) as error:
            trajectory.ended = "failed"
            trajectory.error = f"{type(error).__name__}: {error}"
        return trajectory

    async def _play(self, env: GuardedEnv, trajectory: Trajectory, env_seed: int, generate: Generate) -> None:
        now = env.reset(trajectory.task_id, env_seed)
        trajectory.family, trajectory.solution = now.family, env.walkthrough()
        history: list[tuple[str, str]] = []
        while not (now.terminated or now.truncated):
            step = len(history) + 1
            try:
                prompt = self.prompts.build(
                    task=now.task,
                    observation=now.observation,
                    admissible_actions=now.admissible_actions,
                    history=history,
                    step=step,
                )
            except PromptTooLongError as error:
                trajectory.ended, trajectory.error = "prompt_limit", str(error)
                return
            response = await generate(prompt.ids, self._params(trajectory.seed, step))
            projection = self.prompts.template.project(self.decode(response.response_ids))
            before, now = now, env.step(projection.action)
            trajectory.turns.append(
                Turn(
                    prompt_ids=prompt.ids,
                    response_ids=response.response_ids,
                    logprobs=response.logprobs,
                    weight_version=response.weight_version,
                    insert_at=prompt.insert_at,
                    observation=before.observation,
                    action=projection.action,
                    valid=projection.valid,
                    outcome=now.observation,
                    reward=now.reward,
                    finish_reason=response.finish_reason,
                    prompt_cut=prompt.cut,
                )
            )
            history.append((before.observation, projection.action))
        trajectory.success, trajectory.score = now.won, now.score
        trajectory.ended = "terminated" if now.terminated else "turn_limit"

    def _params(self, seed: int, step: int) -> SamplingParams:
        return replace(self.params, seed=derive_seed(seed, step)) if self.seeded else self.params


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) that depends on the parts alone: the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF

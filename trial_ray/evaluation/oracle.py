"""The walkthrough oracle through the same results as a policy: the upper bound of an evaluation."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from typing import Any

from ray import cloudpickle

from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import EnvironmentFaultError, InfrastructureError, UserInputError
from trial_ray.evaluation.panels import Panel
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.rollout.episode import Decision, History, play_episode
from trial_ray.rollout.trajectory import EpisodeResult

PROCESSES = 2
EPISODE_DEADLINE_S = 120.0

_env: GuardedEnv | None = None
"""The environment of a worker process."""


class WalkthroughPlayer:
    """Replays the environment's own solution of the running task; gives up when it is at its end."""

    def __init__(self, env: GuardedEnv) -> None:
        self._env = env

    async def act(self, result: StepResult, history: History, step: int) -> Decision | None:
        """The next action of the solution.

        Raises:
            UserInputError: the environment knows none.
        """
        if step == 1:
            self._actions = self._env.walkthrough()
            if not self._actions:
                raise UserInputError(f"{self._env.name} has no walkthrough, so there is no oracle for it.")
        return Decision(self._actions[step - 1]) if step <= len(self._actions) else None


def evaluate_oracle(
    panel: Panel,
    entry: EnvironmentEntry,
    known: Mapping[str, EpisodeResult] | None = None,
    on_episode: Callable[[EpisodeResult], None] = lambda episode: None,
) -> EvaluationResult:
    """Replay the walkthrough of every task of an evaluation set, in two processes.

    Args:
        panel: the tasks.
        entry: the environment.
        known: episodes by task that need not be played.
        on_episode: told of every episode as it ends, in any order.

    Returns:
        The episodes in the order of the evaluation set.

    Raises:
        InfrastructureError: no episode ended within the deadline.
        EnvironmentFaultError: the environment cannot be made, or fails on a task.
        UserInputError: the environment has no walkthrough.
    """
    finished = dict(known or {})
    pending = [task for task in panel.task_ids if task not in finished]
    context = multiprocessing.get_context("spawn")  # the game engine's library must not be shared by a fork
    with context.Pool(min(PROCESSES, len(pending)) or 1, _open, (cloudpickle.dumps(entry),)) as pool:
        episodes = pool.imap_unordered(_play, pending)
        for done in range(len(pending)):
            try:
                episode = episodes.next(timeout=EPISODE_DEADLINE_S)
            except multiprocessing.TimeoutError:
                raise InfrastructureError(
                    f"No oracle episode ended within {EPISODE_DEADLINE_S:.0f} s ({done} of {len(pending)} had)."
                ) from None
            finished[episode.task_id] = episode
            on_episode(episode)
    ordered = [finished[task] for task in panel.task_ids]
    return EvaluationResult(oracle_protocol(panel, entry), ordered, policy="walkthrough oracle")


def oracle_protocol(panel: Panel, entry: EnvironmentEntry) -> dict[str, Any]:
    """Protocol of the oracle's evaluation on ``panel``."""
    return {**panel.protocol(), "max_turns": entry.max_turns}


def _open(entry: bytes) -> None:
    global _env
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends its workers
    _env = GuardedEnv(cloudpickle.loads(entry))


def _play(task_id: str) -> EpisodeResult:
    assert _env is not None
    trajectory = asyncio.run(play_episode(_env, task_id, WalkthroughPlayer(_env)))
    if trajectory.failed:
        raise EnvironmentFaultError(trajectory.error)
    return EpisodeResult.from_trajectory(trajectory)

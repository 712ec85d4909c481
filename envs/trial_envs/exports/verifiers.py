"""Text environments as a taskset and an environment of verifiers (``vf-eval``, prime-rl).

The taskset id ``trial-verifiers`` selects the taskset and the environment, because the package
:mod:`trial_verifiers` exports both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from trial_envs.chat import (
    SYSTEM_PROMPT,
    episode_metrics,
    make_chat_env,
    make_text_env,
    user_message,
    with_task,
)
from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError

try:
    import verifiers.v1 as vf
except ImportError as error:
    raise MissingPackageError(f"Verifiers 0.4 or later is not installed: {install_command('verifiers')}") from error

TASKSET_ID = "trial-verifiers"


class TextTasksetConfig(vf.TasksetConfig):
    """Selects the environment, the split and the tasks; set on the command line with ``--env.taskset.*``."""

    env_id: str = "trial/ALFWorld-v0"
    """Id of a text environment."""
    split: str | None = None
    """Split of the tasks, or ``None`` for the environment's default split."""
    num_tasks: int | None = None
    """Number of tasks, from the start of the split, or ``None`` for all tasks."""
    settings: dict[str, Any] = {}  # noqa: RUF012
    """Further keyword arguments of the environment."""


class TextTaskData(vf.TaskData):
    """A task id and the environment's arguments. There is no observation, because listing the tasks starts no episode."""

    env_id: str
    task_id: str
    settings: dict[str, Any]


class TextState(vf.State):
    """State of a rollout."""

    total_reward: float = 0.0
    """Sum of the environment's rewards, written by :class:`TextEnvironment`."""


class TextTask(vf.Task[TextTaskData, TextState, vf.TaskConfig]):
    """One task; ``vf-validate`` plays the environment's walkthrough, a list of actions that wins."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def environment(self, trace: vf.Trace) -> float:
        """Return the sum of the environment's rewards."""
        return float(trace.state.total_reward)

    async def validate(self, runtime: vf.Runtime) -> bool | None:
        """Return whether the environment's walkthrough wins; ``None`` if it has no walkthrough."""
        return await asyncio.to_thread(_walkthrough_wins, self.data)


def _walkthrough_wins(data: TextTaskData) -> bool | None:
    env = make_text_env(data.env_id, **data.settings)
    try:
        _, info = env.reset(options={"task": data.task_id})
        actions, over = tuple(getattr(env.unwrapped, "walkthrough", ())), False
        for action in actions:
            if over:
                break
            _, _, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        return bool(info["won"]) if actions else None
    finally:
        env.close()


class TextTaskset(vf.Taskset[TextTask, TextTasksetConfig]):
    """The tasks of a split, in the environment's order.

    Raises:
        UnknownSplitError, MissingDataError: the environment has no such split, or its data are missing.
    """

    def load(self) -> Iterator[TextTask]:
        """Yield the tasks; their data contain only ids and settings."""
        config = self.config
        settings = config.settings | ({} if config.split is None else {"split": config.split})
        env = make_text_env(config.env_id, **settings)
        try:
            task_ids = env.unwrapped.tasks()[: config.num_tasks]  # type: ignore[attr-defined]
        finally:
            env.close()
        for task_id in task_ids:
            data = TextTaskData(
                id=task_id,
                name=task_id,
                system_prompt=SYSTEM_PROMPT,
                env_id=config.env_id,
                task_id=task_id,
                settings=settings,
            )
            yield TextTask(data, config.task)


class TextEnvironmentConfig(vf.EnvConfig):
    """Config of the environment; by default, its agent chats without tools (harness ``null``) on this machine without a sandbox."""

    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class TextEnvironment(vf.Env[TextEnvironmentConfig]):
    """Plays an episode as a conversation: the environment's observations are the user messages.

    The trace's reward ``environment`` is the sum of the environment's rewards. The trace's metrics are those of
    :func:`trial_envs.chat.episode_metrics`.
    """

    async def run(self, task: TextTask, agents: vf.Agents) -> None:
        """Play the task until the environment ends or truncates the episode, or verifiers ends the agent's conversation."""
        data = task.data
        env = await asyncio.to_thread(make_chat_env, data.env_id, **data.settings)
        total, turns, invalid, over = 0.0, 0, 0, False
        try:
            observation, info = await asyncio.to_thread(env.reset, options={"task": data.task_id})
            observation = with_task(observation, info)
            async with agents.agent.interaction(task) as interaction:
                while not over:
                    segment = await interaction.turn(user_message(observation, info))
                    if segment.terminated:
                        break
                    observation, reward, terminated, truncated, info = await asyncio.to_thread(
                        env.step, segment.last_reply
                    )
                    total, turns, over = total + float(reward), turns + 1, terminated or truncated
                    interaction.trace.state.total_reward = total
                    invalid += info["invalid_response"]
        finally:
            env.close()
        interaction.trace.record_metrics(episode_metrics(total, turns, invalid, info))


def load_environment(
    env_id: str, split: str | None = None, num_tasks: int | None = None, **settings: Any
) -> TextEnvironment:
    """Make the environment in code, as ``vf-eval trial-verifiers`` does from the command line.

    Args:
        env_id: id of a text environment, such as ``trial/ALFWorld-v0``.
        split: split of the tasks, or ``None`` for the environment's default split.
        num_tasks: number of tasks, from the start of the split, or ``None`` for all tasks.
        settings: further keyword arguments of the environment.
    """
    taskset = TextTasksetConfig(id=TASKSET_ID, env_id=env_id, split=split, num_tasks=num_tasks, settings=settings)
    return TextEnvironment(TextEnvironmentConfig(taskset=taskset))

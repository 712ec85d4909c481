"""A text environment as an object with one tool, for libraries that call tools (TRL's ``environment_factory``)."""

from __future__ import annotations

from typing import Any

import gymnasium

import trial_envs
from trial_envs.core import TextEnv


class ToolEnv:
    """Plays one episode at a time: ``reset`` starts it, the tool ``act`` takes a step, ``get_reward`` returns its reward.

    TRL offers every public method but ``reset`` and ``get_reward`` to the model as a tool, so ``act`` is the only other
    one.

    Args:
        env_id: id of a text environment.
        settings: keyword arguments of ``gymnasium.make``.

    Raises:
        TypeError: the environment is not a :class:`trial_envs.core.TextEnv`.
    """

    def __init__(self, env_id: str, **settings: Any) -> None:
        trial_envs.register()
        self._env = gymnasium.make(env_id, disable_env_checker=True, **settings)
        if not isinstance(self._env.unwrapped, TextEnv):
            raise TypeError(f"{env_id} is a {type(self._env.unwrapped).__name__}, expected a TextEnv of trial_envs")
        self._over = True
        self._total = 0.0

    def reset(self, task: str | int | None = None, **columns: object) -> str:
        """Starts an episode and returns its first observation and the admissible actions.

        Args:
            task: task id or index; ``None`` draws one. TRL passes the dataset's column of this name.
            columns: the dataset's other columns, which are ignored.
        """
        self._over, self._total = True, 0.0
        observation, info = self._env.reset(options={"task": task})
        self._over = False
        return _show(observation, info)

    def act(self, action: str) -> str:
        """
        Carry out one action in the environment.

        Args:
            action: The action, worded exactly as one of the actions on offer.

        Returns:
            What happened, and the actions on offer now.
        """
        if self._over:
            return "The episode is over."
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._total += float(reward)
        self._over = terminated or truncated
        return f"{observation}\n\nThe episode is over." if self._over else _show(observation, info)

    def get_reward(self) -> float:
        """The sum of the rewards of the episode so far."""
        return self._total


def _show(observation: str, info: dict[str, Any]) -> str:
    return f"{observation}\n\nActions: {', '.join(info['admissible_actions'])}"

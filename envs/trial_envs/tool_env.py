"""A text environment as an object with a tool: what agent libraries that call tools expect (TRL's environment factory)."""

from __future__ import annotations

from typing import Any

import gymnasium

import trial_envs
from trial_envs.core import TextEnv


class ToolEnv:
    """One slot for episodes: ``reset`` starts one, the tool ``act`` plays it, ``get_reward`` says how it came out.

    Every public method but ``reset`` and ``get_reward`` is offered to the model as a tool, so there is no other.
    Dropping the object frees the environment.

    Args:
        env_id: id of a text environment.
        settings: keyword arguments of ``gymnasium.make``.
    """

    def __init__(self, env_id: str, **settings: Any) -> None:
        trial_envs.register()
        self._env = gymnasium.make(env_id, disable_env_checker=True, **settings)
        if not isinstance(self._env.unwrapped, TextEnv):
            raise TypeError(f"{env_id} is no text environment of this package")
        self._over = True
        self._total = 0.0

    def reset(self, task: str | int | None = None, **row: Any) -> str:
        """Starts an episode and returns its first observation with the actions on offer.

        Args:
            task: id or place of the task; ``None`` draws one. A dataset's column of this name chooses the task.
            row: further columns of the dataset, which are ignored.
        """
        observation, info = self._env.reset(options={"task": task})
        self._over, self._total = False, 0.0
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

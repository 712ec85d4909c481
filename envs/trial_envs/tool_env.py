"""Text environments as objects with tools, for libraries that call tools (TRL's ``environment_factory``).

TRL offers every public method except ``reset`` and ``get_reward`` to the model as a tool; the method's name, type hints and
docstring become the tool's schema. :class:`ToolEnv` has the single tool ``act`` for every environment.
:class:`trial_envs.alfworld.tool_env.ALFWorldToolEnv`, :class:`trial_envs.webshop.tool_env.WebShopToolEnv` and
:class:`trial_envs.search_qa.tool_env.SearchQAToolEnv` have one tool for each command of their environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trial_envs.chat import make_text_env, user_message, with_task


class ToolEpisode:
    """Base class of text environments with tools; a subclass adds the tools as public methods.

    A tool method makes an action from its arguments, passes it to :meth:`_take` and returns the result. An object plays any
    number of episodes, one at a time.

    Args:
        env_id: id of a text environment.
        settings: keyword arguments of ``gymnasium.make``.

    Raises:
        TypeError: the environment is not a :class:`trial_envs.core.TextEnv`.
    """

    def __init__(self, env_id: str, **settings: Any) -> None:
        self._env = make_text_env(env_id, **settings)
        self._over = True
        self._total = 0.0

    def reset(self, task: str | int | None = None, **columns: object) -> str:
        """Start an episode and return its task, its first observation and the admissible actions.

        Args:
            task: task id or index; ``None`` draws one. TRL passes the dataset's column of this name.
            columns: the dataset's other columns, which are ignored.
        """
        self._over, self._total = True, 0.0
        observation, info = self._env.reset(options={"task": task})
        self._over = False
        return self._show(with_task(observation, info), info)

    def get_reward(self) -> float:
        """Return the sum of the rewards of the episode so far."""
        return self._total

    def _take(self, command: str) -> str:
        """Carry out an action; return the observation and the actions that are admissible after it."""
        if self._over:
            return "The episode is over."
        observation, reward, terminated, truncated, info = self._env.step(command)
        self._total += float(reward)
        self._over = terminated or truncated
        if self._over:
            return f"{observation}\n\nThe episode is over."
        return self._show(observation, info)

    def _show(self, observation: str, info: dict[str, Any]) -> str:
        return user_message(observation, info)


class ToolEnv(ToolEpisode):
    """Any text environment with the single tool ``act``, which takes the action as its argument.

    Args:
        env_id: id of a text environment.
        settings: keyword arguments of ``gymnasium.make``.

    Raises:
        TypeError: the environment is not a :class:`trial_envs.core.TextEnv`.
    """

    def act(self, action: str) -> str:
        """
        Carry out one action in the environment.

        Args:
            action: The action, worded exactly as one of the actions on offer.

        Returns:
            What happened, and the actions on offer now.
        """
        return self._take(str(action))


def command_tools(tools: type[ToolEpisode]) -> dict[str, Callable[..., str]]:
    """Return the tools of a class by name, as functions that return the action as text instead of carrying it out."""
    commands: ToolEpisode = object.__new__(type(tools.__name__, (tools,), {"_take": lambda self, command: command}))
    methods = [name for name, _ in inspect.getmembers(tools, inspect.isfunction)]
    return {name: getattr(commands, name) for name in methods if name[0] != "_" and name not in ("reset", "get_reward")}

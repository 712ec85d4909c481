"""Action projection: ``step`` takes a language model's whole response and carries out the action in it."""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from trial_envs.core.projection import ResponseStyle, project_action, with_opening


class ActionProjection(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Reads the action from a response as :func:`trial_envs.core.projection.project_action` does.

    A ``"tagged"`` response may lack the ``<think>`` that a chat template wrote before it
    (:func:`trial_envs.core.projection.with_opening`).

    ``info["action"]`` is the action that was carried out (``None`` after ``reset``). ``info["invalid_response"]`` is true if
    the response did not have the required format, ``info["invalid_action"]`` if the environment did not understand the action.

    Args:
        env: an environment with texts as actions.
        style: response format, ``"tagged"`` or ``"plain"``.
        tail: number of last characters that become the action of a ``"tagged"`` response without action tags.
        keep_case: whether the action of a ``"tagged"`` response keeps its upper-case letters.

    Raises:
        ValueError: unknown ``style``, or ``tail`` below 1.
    """

    def __init__(
        self, env: gymnasium.Env[str, str], style: ResponseStyle = "tagged", tail: int = 30, keep_case: bool = False
    ) -> None:
        RecordConstructorArgs.__init__(self, style=style, tail=tail, keep_case=keep_case)
        gymnasium.Wrapper.__init__(self, env)
        project_action("", style, tail)  # Wrong settings raise an error here, not at the first step.
        self._style: ResponseStyle = style
        self._tail = tail
        self._keep_case = keep_case

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, info | {"action": None, "invalid_response": False}

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Carry out the action in a response.

        Args:
            action: the whole response.

        Raises:
            TypeError: the response is not a string.
        """
        if not isinstance(action, str):
            raise TypeError(f"Expected a response of type str, got {type(action).__name__}.")
        response = with_opening(action) if self._style == "tagged" else action
        projection = project_action(response, self._style, self._tail, self._keep_case)
        observation, reward, terminated, truncated, info = self.env.step(projection.action)
        projected = {"action": projection.action, "invalid_response": not projection.valid}
        return observation, reward, terminated, truncated, info | projected

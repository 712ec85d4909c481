"""History: the last turns stand before the current observation."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
from gymnasium.spaces import Text
from gymnasium.utils import RecordConstructorArgs

from trial_envs.core import AnyText

_TURN = "{observation}\n> {action}\n"


class HistoryWindow(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Puts the last ``size`` observations, each with the action that followed, before the current observation.

    ``info["history"]`` holds them as (observation, action) pairs, oldest first, for prompts of one's own.

    Args:
        env: an environment whose observations and actions are texts.
        size: number of turns that are remembered, at least 1.

    Raises:
        ValueError: ``size`` is below 1.
        TypeError: observations or actions are no texts.
    """

    def __init__(self, env: gymnasium.Env[str, str], size: int = 2) -> None:
        RecordConstructorArgs.__init__(self, size=size)
        gymnasium.Wrapper.__init__(self, env)
        seen, done = env.observation_space, env.action_space
        if not isinstance(seen, Text) or not isinstance(done, Text):
            raise TypeError(f"a history is made of texts; found the spaces {seen} and {done}")
        if size < 1:
            raise ValueError(f"size is {size}; a history has at least one turn")
        turn = seen.max_length + done.max_length + len(_TURN.format(observation="", action=""))
        self.observation_space = AnyText(size * turn + seen.max_length)
        self._history: deque[tuple[str, str]] = deque(maxlen=size)
        self._observation = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode, whose history is empty."""
        self._observation, info = self.env.reset(seed=seed, options=options)
        self._history.clear()
        return self._observation, info | {"history": []}

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        """Carries out the action; it and the observation that it answered become the newest turn."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._history.append((self._observation, action))
        self._observation = observation
        past = "".join(_TURN.format(observation=seen, action=done) for seen, done in self._history)
        return past + observation, reward, terminated, truncated, info | {"history": list(self._history)}

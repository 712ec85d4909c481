"""History: the last turns are prepended to the current observation."""

from __future__ import annotations

from collections import deque
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.spaces import Text
from gymnasium.utils import RecordConstructorArgs

from trial_envs.core import AnyText

_TURN = "{observation}\n> {action}\n"


class HistoryWindow(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Prepends the last ``size`` observations, each with the action that followed, to the current observation.

    ``info["history"]`` contains these turns as (observation, action) pairs, oldest first.

    Args:
        env: an environment with texts as observations and actions.
        size: number of turns to keep, at least 1.

    Raises:
        ValueError: ``size`` is below 1.
        TypeError: the observation or action space is not a ``Text`` space.
    """

    def __init__(self, env: gymnasium.Env[str, str], size: int = 2) -> None:
        RecordConstructorArgs.__init__(self, size=size)
        gymnasium.Wrapper.__init__(self, env)
        observations, actions = env.observation_space, env.action_space
        if not isinstance(observations, Text) or not isinstance(actions, Text):
            raise TypeError(
                f"Expected Text spaces, got the observation space {observations} and the action space {actions}."
            )
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1")
        turn = observations.max_length + actions.max_length + len(_TURN.format(observation="", action=""))
        self.observation_space = AnyText(size * turn + observations.max_length)
        self._history: deque[tuple[str, str]] = deque(maxlen=size)
        self._observation = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode with an empty history."""
        self._observation, info = self.env.reset(seed=seed, options=options)
        self._history.clear()
        return self._observation, info | {"history": []}

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Carry out the action; the observation before it and the action are appended to the history."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._history.append((self._observation, action))
        self._observation = observation
        past = "".join(_TURN.format(observation=before, action=after) for before, after in self._history)
        return past + observation, reward, terminated, truncated, info | {"history": list(self._history)}

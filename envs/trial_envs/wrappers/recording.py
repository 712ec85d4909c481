"""Recording: appends every episode to a transcript file."""

from __future__ import annotations

import os
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from trial_envs.wrappers.transcript import Episode, Step, append_episode, open_transcript


class Recording(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Appends each episode to a file of JSON lines when it ends, or when ``reset`` or ``close`` cuts it short.

    :func:`trial_envs.wrappers.read_episodes` reads the file. Several environments and processes may write to one file.
    The recorded action is the argument of this wrapper's ``step``: around an :class:`ActionProjection`, the whole
    response.

    Args:
        env: the environment.
        path: the file; it is created if missing, its folder is not.

    Raises:
        OSError: the file cannot be written to.
        CorruptTranscriptError: the file ends with a text that is no part of a transcript.
    """

    def __init__(self, env: gymnasium.Env[str, str], path: str | os.PathLike[str]) -> None:
        RecordConstructorArgs.__init__(self, path=os.fspath(path))
        gymnasium.Wrapper.__init__(self, env)
        self._path = os.path.abspath(path)
        self._seed: int | None = None
        self._steps: list[Step] = []
        with open_transcript(self._path):
            pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; a running one is recorded unfinished."""
        self._write()
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed = seed
        self._steps.append(Step(None, observation, 0.0, False, False, _plain(info)))
        return observation, info

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Carries out the action; the last step of an episode writes it to the file."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps.append(Step(action, observation, float(reward), terminated, truncated, _plain(info)))
        if terminated or truncated:
            self._write()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Records the running episode unfinished, and closes the environment."""
        try:
            self._write()
        finally:
            self.env.close()

    def _write(self) -> None:
        """Writes the episode if it has an action."""
        steps, self._steps = tuple(self._steps), []
        if len(steps) > 1:
            append_episode(self._path, Episode(self._name(), self._seed, steps))

    def _name(self) -> str:
        return self.spec.id if self.spec else type(self.unwrapped).__name__


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """A copy with Python values in place of NumPy scalars and arrays, for JSON."""
    return {key: value.tolist() if isinstance(value, np.generic | np.ndarray) else value for key, value in info.items()}

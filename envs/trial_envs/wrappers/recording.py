"""Recording: appends every episode to a transcript file."""

from __future__ import annotations

import json
import os
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from trial_envs.errors import UnrecordableInfoError
from trial_envs.wrappers.transcript import Episode, Step, append_episode, open_transcript


class Recording(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Appends each episode to a file of JSON lines when it ends, or when ``reset`` or ``close`` interrupts it.

    :func:`trial_envs.wrappers.read_episodes` reads the file. Several environments and processes may write to one file.
    The recorded action is the argument of this wrapper's ``step``; if the wrapped environment is an :class:`ActionProjection`,
    the argument is the whole response. An episode that could not be written is kept, and the next ``reset`` or ``close`` writes
    it.

    Args:
        env: the environment.
        path: the file, which is created if missing; its folder must exist.

    Raises:
        OSError: the file cannot be written to.
        CorruptTranscriptError: the file ends with a text that is not part of a transcript.
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
        """Start an episode; a running episode is recorded as unfinished.

        Raises:
            UnrecordableInfoError: ``info`` has a value that cannot be converted to JSON.
        """
        self._write()
        observation, info = self.env.reset(seed=seed, options=options)
        self._seed = seed
        self._steps.append(Step(None, observation, 0.0, False, False, _plain(info)))
        return observation, info

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Carry out the action; if it ends the episode, write the episode to the file.

        Raises:
            UnrecordableInfoError: ``info`` has a value that cannot be converted to JSON; the step is not recorded.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps.append(Step(action, observation, float(reward), bool(terminated), bool(truncated), _plain(info)))
        if terminated or truncated:
            self._write()
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Record the running episode as unfinished and close the environment."""
        try:
            self._write()
        finally:
            self.env.close()

    def _write(self) -> None:
        """Write the recorded episode to the file if it has at least one action."""
        if len(self._steps) > 1:
            append_episode(self._path, Episode(self._name(), self._seed, tuple(self._steps)))
        self._steps = []

    def _name(self) -> str:
        return self.spec.id if self.spec else type(self.unwrapped).__name__


def _plain(info: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``info`` that JSON can represent, with Python values in place of NumPy scalars and arrays."""
    plain: dict[str, Any] = {}
    for key, value in info.items():
        try:
            plain |= json.loads(json.dumps({key: value}, default=_python_value))
        except (TypeError, ValueError, RecursionError) as error:
            raise UnrecordableInfoError(
                f"info[{key!r}], of type {type(value).__name__}, cannot be recorded ({error}); expected values of JSON or NumPy: "
                "leave it out of info."
            ) from error
    return plain


def _python_value(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")

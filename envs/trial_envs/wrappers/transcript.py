"""Transcripts: played episodes as JSON lines, one episode per line."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trial_envs.errors import CorruptTranscriptError


@dataclass(frozen=True)
class Step:
    """What ``reset`` (``action`` is ``None``) or ``step`` returned."""

    action: str | None
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True)
class Episode:
    """A played episode."""

    env: str
    """Id of the environment."""
    seed: int | None
    """The seed given to ``reset``, if any."""
    steps: tuple[Step, ...]
    """What ``reset`` returned, then one step for every action."""

    @property
    def ended(self) -> bool:
        """Whether the episode was terminated or truncated; otherwise ``reset`` or ``close`` cut it short."""
        return self.steps[-1].terminated or self.steps[-1].truncated

    @property
    def total_reward(self) -> float:
        """The sum of the rewards, undiscounted."""
        return sum(step.reward for step in self.steps)


def append_episode(path: str | os.PathLike[str], episode: Episode) -> None:
    """Appends one line; a file lock orders the writes of several processes.

    An incomplete last line, which a killed process may leave, is removed first.

    Raises:
        TypeError: ``info`` holds a value that cannot be serialised to JSON.
    """
    line = json.dumps(asdict(episode)).encode() + b"\n"
    with open(path, "a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        os.ftruncate(stream.fileno(), _end_of_last_line(stream))
        stream.write(line)


def read_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """The episodes of a file, in the order in which they ended; an incomplete last line is skipped.

    Raises:
        CorruptTranscriptError: a line is not an episode.
    """
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                steps = tuple(Step(**step) for step in record.pop("steps"))
                yield Episode(steps=steps, **record)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise CorruptTranscriptError(
                    f"line {number} of {Path(path)} is not an episode: {type(error).__name__}: {error}"
                ) from error


def _end_of_last_line(stream: BinaryIO, block: int = 65536) -> int:
    end = stream.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        stream.seek(start)
        found = stream.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0

"""Transcripts: played episodes as JSON lines, one episode per line."""

from __future__ import annotations

import contextlib
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
    """Result of a call of ``reset`` (``action`` is then ``None``) or ``step``."""

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
    """Seed that was passed to ``reset``; ``None`` if there was none."""
    steps: tuple[Step, ...]
    """The result of ``reset``, followed by one step for every action."""

    @property
    def ended(self) -> bool:
        """True if the episode was terminated or truncated, False if ``reset`` or ``close`` interrupted it."""
        return self.steps[-1].terminated or self.steps[-1].truncated

    @property
    def total_reward(self) -> float:
        """The sum of the rewards, undiscounted."""
        return sum(step.reward for step in self.steps)


_OPENING = b'{"env": "'
"""Beginning of every line that :func:`append_episode` writes."""


def append_episode(path: str | os.PathLike[str], episode: Episode) -> None:
    """Append an episode as one line; a file lock orders the writes of several processes.

    An incomplete last line, which a killed process may leave, is removed first.

    Raises:
        TypeError: ``info`` has a value that cannot be serialised to JSON.
        CorruptTranscriptError: the file ends with a text that is not part of an episode; nothing is removed.
    """
    line = json.dumps(asdict(episode)).encode() + b"\n"
    with open_transcript(path) as stream:
        stream.write(line)


@contextlib.contextmanager
def open_transcript(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open and lock a file to append episodes; create it if missing, and repair its last line.

    Raises:
        OSError: the file cannot be written to.
        CorruptTranscriptError: the file ends with a text that is not part of an episode.
    """
    with open(path, "a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        _complete_last_line(stream)
        yield stream


def read_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """Yield the episodes of a file in the order in which they ended; an incomplete last line is skipped.

    Raises:
        CorruptTranscriptError: a line is not an episode.
    """
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n") and _is_incomplete(line):
                return
            try:
                yield _parse(line)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise CorruptTranscriptError(
                    f"Line {number} of {Path(path)} is not an episode: {type(error).__name__}: {error}"
                ) from error


def _parse(line: bytes) -> Episode:
    record = json.loads(line)
    steps = tuple(Step(**step) for step in record.pop("steps"))
    return Episode(steps=steps, **record)


def _is_incomplete(line: bytes) -> bool:
    """Return whether a line without a line break at its end is a partly written episode."""
    if not line.startswith(_OPENING):
        return _OPENING.startswith(line)
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _complete_last_line(stream: BinaryIO) -> None:
    """Append a missing line break after a complete last episode; remove an incomplete last episode."""
    start, line = _unended_line(stream)
    if not line:
        return
    if _is_incomplete(line):
        os.ftruncate(stream.fileno(), start)
        return
    try:
        _parse(line)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise CorruptTranscriptError(
            f"{stream.name} ends with {line[:80]!r}, which is not part of an episode; choose another file."
        ) from error
    stream.write(b"\n")


def _unended_line(stream: BinaryIO, block: int = 65536) -> tuple[int, bytes]:
    """Return the position after the file's last line break, and the text from there to the end."""
    end = start = stream.seek(0, os.SEEK_END)
    line = b""
    while start > 0:
        start = max(0, start - block)
        stream.seek(start)
        line = stream.read(end - start)
        if b"\n" in line:
            break
        block *= 2
    line = line[line.rfind(b"\n") + 1 :]
    return end - len(line), line

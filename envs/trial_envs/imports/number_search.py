"""A scripted policy for the number-guessing games of TextArena and GEM: it halves the remaining range."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANGE = re.compile(r"number between (\d+) and (\d+)")
_NUMBER = re.compile(r"\d+")


class NumberSearch:
    """Guesses the number in the middle of the remaining range; it uses only the task and the observations.

    Args:
        form: format of a guess, with ``{}`` in place of the number, such as ``[{}]``.
    """

    def __init__(self, form: str) -> None:
        self._form = form

    @staticmethod
    def plays(task: str) -> bool:
        """Return whether the task is to guess a number in a range."""
        return _RANGE.search(task) is not None

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode.

        Raises:
            ValueError: the task has no range.
        """
        match = _RANGE.search(task)
        if match is None:
            raise ValueError(f"Expected a task with 'number between A and B', got {task!r:.200}.")
        self._low, self._high = int(match[1]), int(match[2])
        self._last: int | None = None

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return a guess of the number in the middle of the remaining range."""
        if self._last is not None and "higher" in observation:
            self._low = max(self._low, self._last + 1)
        elif self._last is not None and "lower" in observation:
            self._high = min(self._high, self._last - 1)
        return self._form.format((self._low + self._high) // 2)

    def carried_out(self, action: str) -> None:
        """Record the number that the carried-out action guesses, if the action contains a number."""
        match = _NUMBER.search(action)
        self._last = int(match[0]) if match else None

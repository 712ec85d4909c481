"""Task ids that are consecutive numbers, as strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from trial_envs.errors import UnknownTaskError


class TaskNumbers(Sequence[str]):
    """Consecutive numbers as task ids; the strings are created on access, because there may be millions."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def number_of(self, task_id: str) -> int:
        """Return the number of a task id.

        Raises:
            UnknownTaskError: there is no task of this id.
        """
        number = int(task_id) if task_id.isascii() and task_id.isdigit() and len(task_id) < 12 else -1
        if number not in self._numbers:
            raise UnknownTaskError(
                f"There is no task {task_id[:80]!r}, expected a number from 0 to {len(self._numbers) - 1}."
            )
        return number

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> TaskNumbers: ...

    def __getitem__(self, index: int | slice) -> str | TaskNumbers:
        if isinstance(index, slice):
            return TaskNumbers(self._numbers[index])
        return str(self._numbers[index])

    def __eq__(self, other: object) -> bool:
        return self._numbers == other._numbers if isinstance(other, TaskNumbers) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        return f"TaskNumbers({self._numbers})"

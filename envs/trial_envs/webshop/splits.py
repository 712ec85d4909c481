"""Splits of a shop's goals: two conventions, both by goal number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from trial_envs.errors import UnknownSplitError, UnknownTaskError

GENERATED = "generated"

_BOUNDS: dict[str, tuple[int, int | None]] = {
    "train": (500, None),
    "test": (0, 500),
    "orig_train": (1500, None),
    "orig_eval": (500, 1500),
    "orig_test": (0, 500),
    "all": (0, None),
    GENERATED: (0, None),
}
"""Split -> its first goal and the one after its last. ``train`` and ``test`` are those of agent training on the
1,000-product set, ``orig_*`` those of the publication, for the full catalogue."""

SPLITS = tuple(_BOUNDS)


def check_split(split: str) -> str:
    """Check the name of a split and return it.

    Raises:
        UnknownSplitError: WebShop has no such split.
    """
    if split not in SPLITS:
        raise UnknownSplitError(f"WebShop has no split {split!r}; expected one of {', '.join(SPLITS)}.")
    return split


def split_goals(split: str, num_goals: int) -> GoalNumbers:
    """Return the goals of a split in a shop with ``num_goals`` goals; empty if the shop has too few goals."""
    first, end = _BOUNDS[check_split(split)]
    return GoalNumbers(range(num_goals)[first:end])


class GoalNumbers(Sequence[str]):
    """Goal numbers as task ids; the strings are created on access, because there may be millions."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def number_of(self, task_id: str) -> int:
        """Return the number that a task id names.

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
    def __getitem__(self, index: slice) -> GoalNumbers: ...

    def __getitem__(self, index: int | slice) -> str | GoalNumbers:
        if isinstance(index, slice):
            return GoalNumbers(self._numbers[index])
        return str(self._numbers[index])

    def __eq__(self, other: object) -> bool:
        return self._numbers == other._numbers if isinstance(other, GoalNumbers) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        return f"GoalNumbers({self._numbers})"

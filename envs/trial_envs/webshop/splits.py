"""Splits of a shop's goals, which are ranges of goal numbers."""

from __future__ import annotations

from trial_envs.core.task_numbers import TaskNumbers
from trial_envs.errors import UnknownSplitError

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
"""Number of the first goal of each split, and the number after its last goal (``None``: the end of the shop's goals).

``train`` and ``test`` are the usual splits in agent training with WebShop's 1,000-product set; the splits ``orig_*`` are those of
the WebShop paper, for the full catalogue."""

SPLITS = tuple(_BOUNDS)


def check_split(split: str) -> str:
    """Check the name of a split and return it.

    Raises:
        UnknownSplitError: WebShop has no such split.
    """
    if split not in SPLITS:
        raise UnknownSplitError(f"WebShop has no split {split!r}; expected one of {', '.join(SPLITS)}.")
    return split


def split_goals(split: str, num_goals: int) -> TaskNumbers:
    """Return the goal numbers of a split in a shop with ``num_goals`` goals; empty if the shop has too few goals."""
    first, end = _BOUNDS[check_split(split)]
    return TaskNumbers(range(num_goals)[first:end])

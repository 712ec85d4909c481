"""What a run has lost: engines and env runners since the last line, and what that cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

FAULTS = "faults"
"""Key of the line in the result of an iteration in which something was replaced."""
SHOWN = 3
"""Losses that a line names; of more it gives the number."""


class FaultLog:
    """Losses since the last line.

    Attributes:
        losses: why actors were lost, one line each, the earliest first.
        played_again: groups of rollouts, or episodes of an evaluation set, that were started again.
        seconds: time that the driver waited for replacements.
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.played_again = 0
        self.seconds = 0.0

    def note(self, loss: str) -> None:
        """An actor is lost; the first line of why."""
        self.losses.append(loss.splitlines()[0].rstrip("."))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as that of waiting for a replacement."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def take(self) -> str:
        """The line, empty where nothing was lost; the next one begins here."""
        losses, cost = self.losses, f"played again: {self.played_again}, waited {self.seconds:.1f} s"
        self.losses, self.played_again, self.seconds = [], 0, 0.0
        more = [f"and {len(losses) - SHOWN} more"] if len(losses) > SHOWN else []
        return f"replaced: {'; '.join(losses[:SHOWN] + more)} ({cost})" if losses else ""

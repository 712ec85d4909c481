"""Log of the engines and env runners lost since the last log line, and the cost of their replacement."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

FAULTS = "faults"
"""Key of the line in the result of an iteration, present if something was replaced."""
MAX_LOSSES_SHOWN = 3
"""Maximum number of losses listed in a line; of further losses only the number is given."""


class FaultLog:
    """Losses since the last line.

    Attributes:
        losses: reasons why actors were lost, one line each, the earliest first.
        played_again: number of rollout groups, or episodes of an evaluation set, that were started again.
        seconds: time that the driver waited for replacements.
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.played_again = 0
        self.seconds = 0.0

    def note(self, loss: str) -> None:
        """Record the loss of an actor, with the first line of the reason."""
        self.losses.append(loss.splitlines()[0].rstrip("."))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time inside the context to the time spent waiting for replacements."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def pop_line(self) -> str:
        """Return the line, empty if nothing was lost, and start a new one."""
        losses, cost = self.losses, f"played again: {self.played_again}, waited {self.seconds:.1f} s"
        self.losses, self.played_again, self.seconds = [], 0, 0.0
        more = [f"and {len(losses) - MAX_LOSSES_SHOWN} more"] if len(losses) > MAX_LOSSES_SHOWN else []
        return f"replaced: {'; '.join(losses[:MAX_LOSSES_SHOWN] + more)} ({cost})" if losses else ""

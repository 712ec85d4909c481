"""What a person sees while a run works: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from trial_ray.metrics import METRICS

if TYPE_CHECKING:
    from rich.console import Console


def describe(metrics: dict[str, float]) -> str:
    """The metrics of one iteration that have a column, in one line; one that a method does not log is left out."""
    columns = {key: metric.column for key, metric in METRICS.items() if metric.column is not None and key in metrics}
    return "  ".join(f"{heading} {form.format(metrics[key])}" for key, (heading, form) in columns.items())


@contextmanager
def waiting(console: Console, text: str) -> Iterator[None]:
    """A moving sign on a terminal while something takes long; nothing anywhere else."""
    from rich.live import Live
    from rich.spinner import Spinner

    # What libraries print meanwhile is not drawn above the sign: it goes where stdout goes.
    with Live(Spinner("dots", text), console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield


def duration(seconds: float) -> str:
    """In the unit in which a person would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class TrainingProgress(AbstractContextManager["TrainingProgress"]):
    """One line an iteration with the time that is left, below it (on a terminal) a bar.

    Args:
        console: where to print.
        done: iterations already behind a resumed run.
        total: iterations in all; ``None`` where another criterion ends the run.
    """

    def __init__(self, console: Console, done: int = 0, total: int | None = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = console
        self._total = total
        self._done = done
        self._began = self._last = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("training", total=total, completed=done, left="")

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def iteration(self, number: int, metrics: dict[str, float]) -> None:
        """Show a finished iteration."""
        now = time.monotonic()
        of = f"/{self._total}" if self._total else ""
        left = ""
        if self._total and number < self._total:
            # Over all iterations of this session, since one that saves a checkpoint takes longer.
            seconds = (now - self._began) / (number - self._done) * (self._total - number)
            left = f"about {duration(seconds)} left"
        took = ", ".join(part for part in (f"{now - self._last:.1f} s", left) if part)
        self._console.print(f"iteration {number}{of}  {describe(metrics)}  ({took})", highlight=False, soft_wrap=True)
        self._last = now
        self._progress.update(self._task, completed=number, left=left)

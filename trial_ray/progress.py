"""Progress bars on a terminal, or lines in a log, for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def progress_bar(
    title: str, total: int | None, enabled: bool = True, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal; elsewhere, print a line after every tenth of the work.

    Args:
        title: title of the bar and of the lines.
        total: number of steps of the work, or ``None`` if it is unknown; then no lines are printed.
        enabled: whether anything is shown.
        console: console to print on; by default rich's global console.

    Yields:
        A function that updates the bar. Its arguments are the number of finished steps, a text on the state of the work, and
        ``line=True`` to print a line immediately if lines are printed.
    """
    import rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = console or rich.get_console()
    with Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        "{task.fields[state]}",
        console=console,
        transient=True,
        disable=not (enabled and console.is_terminal),
        # Do not redirect stdout: rich would print the output of libraries on the console, but it belongs in the run's log file.
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(title, total=total, state="")
        last = 0

        def update(done: int, state: str = "", *, line: bool = False) -> None:
            nonlocal last
            bar.update(task, completed=done, state=state)
            if enabled and total and not console.is_terminal and (line or done * 10 // total > last * 10 // total):
                console.print(f"{title}: {done} of {total}{state and f', {state}'}", markup=False, highlight=False)
            last = done

        yield update

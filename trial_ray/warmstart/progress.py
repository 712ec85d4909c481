"""Progress of a warm start on a terminal or in a log."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trial_ray.warmstart.policy import PlayResult
from trial_ray.warmstart.settings import WarmStartSettings

LINE_EVERY = 100
"""Updates between lines of a log, where no bar can move."""


class WarmStartProgress:
    """A progress bar a stage: games played by the oracle, updates; in a log, lines. A context manager."""

    def __init__(self, settings: WarmStartSettings, enabled: bool) -> None:
        self._settings = settings
        self._success = ""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[state]}"),
            disable=not enabled,
            # What libraries print goes where stdout goes, which may be a file; rich would draw it above the bars.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._collecting = self._bars.add_task("Demonstrations (games)", total=settings.games, state="")
        self._cloning = self._bars.add_task("Cloning (updates)", total=settings.max_steps, start=False, state="")

    def __enter__(self) -> WarmStartProgress:
        """Show the bars."""
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the bars as they are."""
        self._bars.stop()

    def game(self) -> None:
        """The oracle finished a game."""
        self._bars.advance(self._collecting)

    def demonstrated(self) -> None:
        """All games are played, now or by an earlier warm start that was interrupted."""
        self._bars.update(self._collecting, completed=self._settings.games)

    def update(self, step: int, loss: float) -> None:
        """An update was done."""
        if step == 1:
            self._bars.start_task(self._cloning)
        state = f"loss {loss:.2f}{self._success}"
        self._bars.update(self._cloning, completed=step, state=state)
        if step % LINE_EVERY == 0 and not (self._bars.disable or self._bars.console.is_terminal):
            self._bars.console.print(f"Cloning: update {step} of {self._settings.max_steps}, {state}", highlight=False)

    def check(self, result: PlayResult) -> None:
        """A check was played."""
        self._success = f" · held-out success {result.success_rate:.0%} (stops at {self._settings.target_success:.0%})"

"""A Tune callback that prints a line for every iteration of every trial."""

from __future__ import annotations

from typing import Any

from ray import tune
from rich.console import Console

from trial_ray.experiments.metrics import flatten
from trial_ray.experiments.progress import describe


class SweepReporter(tune.Callback):
    """Prints as trials progress. Tune stores its callbacks beside the sweep, so this one holds nothing."""

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A trial finished an iteration."""
        _print(f"{_name(trial)}  iteration {result['training_iteration']}  {describe(flatten(result))}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial failed."""
        _print(f"{_name(trial)}  failed")


def _name(trial: Any) -> str:
    return trial.custom_trial_name or trial.trial_id


def _print(line: str) -> None:
    Console().print(line, highlight=False, soft_wrap=True, markup=False)

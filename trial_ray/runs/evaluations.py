"""Evaluations of a run before and after training, and the names of their files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.errors import UserInputError
from trial_ray.evaluation.comparison import ComparisonError, PairedComparison, paired_comparison, require_same_protocol
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import Json, Record, set_aside

if TYPE_CHECKING:
    from trial_ray.adapters.registry import EnvironmentEntry
    from trial_ray.evaluation.evaluation_sets import EvaluationSet

BEFORE, AFTER = "before", "after"
_TRAINED = re.compile(r"(.+)_([0-9]{6,})")


def evaluation_file(environment: str, iteration: int) -> str:
    """Return the file name of an evaluation that is played before or after training.

    Args:
        environment: name of the evaluation set's environment; empty if the run has a single evaluation set.
        iteration: number of iterations trained before the evaluation; 0 before training.
    """
    when = AFTER if iteration else BEFORE
    name = f"{when}_{environment}" if environment else when
    return set_file(name, iteration) if iteration else f"{name}.json"


def set_file(name: str, iteration: int) -> str:
    """Return the file name of an evaluation after training: ``name`` and the iteration, which has at least six digits.

    Args:
        name: name of the evaluation set; for a set that is also played before training, see :func:`evaluation_file`.
        iteration: number of iterations trained before the evaluation.
    """
    return f"{name}_{iteration:06d}.json"


def read_name(file: Path) -> tuple[str, int] | None:
    """Return the environment or evaluation set, and the iteration, from the name of an evaluation's file; ``None`` for other names.

    The environment is an empty string in a run with a single evaluation set. The iteration is 0 before training.
    """
    when, _, environment = file.stem.partition("_")
    if when == BEFORE:
        return environment, 0
    match = _TRAINED.fullmatch(file.stem)
    if match is None:
        return None
    when, _, environment = match[1].partition("_")
    return environment if when == AFTER else match[1], int(match[2])


def compare_with_beginning(before: EvaluationResult | None, after: EvaluationResult) -> PairedComparison | str:
    """Return the paired comparison of the evaluations before and after training, or the reason why they cannot be compared.

    Evaluations that cannot be compared are not an error, so a run does not fail at its end.
    """
    if before is None:
        return "There was no evaluation before training."
    try:
        return paired_comparison(before, after)
    except ComparisonError as error:
        return str(error)


@dataclass(frozen=True)
class RunEvaluations:
    """Plays a run's evaluation sets before and after training, and stores the results; a stored evaluation is not repeated.

    Attributes:
        folder: folder of the run's evaluations.
        run: name of the run.
        labels: labels of the results (:attr:`EvaluationResult.labels`).
        protocol: returns the settings that determine the result of an evaluation, besides the policy.
        play: plays an evaluation set with the current policy.
        print_line: prints a line for the user.
    """

    folder: Path
    run: str
    labels: Record
    protocol: Callable[[EvaluationSet, EnvironmentEntry], Json]
    play: Callable[[EvaluationSet, EnvironmentEntry], EvaluationResult]
    print_line: Callable[[str], None]

    def before(
        self, environment: str, iteration: int, evaluation_set: EvaluationSet, entry: EnvironmentEntry
    ) -> EvaluationResult | None:
        """Return the evaluation before training: play it in a new run, or read it in a resumed run; ``None`` if it cannot be read.

        If the evaluation after training will use other settings, so that the two cannot be compared, a line is printed now.

        Args:
            environment: name of the environment in file names; empty if the run has a single evaluation set.
            iteration: iterations trained so far.
            evaluation_set: the tasks.
            entry: the environment.
        """
        name = evaluation_file(environment, 0)
        if not iteration:
            return self.after(name, 0, evaluation_set, entry)
        path, result = self.folder / name, None
        if not path.exists():
            self.print_line("there was no evaluation before training, so before and after will not be compared")
            return None
        try:
            result = EvaluationResult.load(path)
            self._print_result(path, result)
            require_same_protocol(result.protocol, self.protocol(evaluation_set, entry))
        except UserInputError as error:
            self.print_line(f"before and after training will not be compared: {error}")
        return result

    def after(
        self, name: str, iteration: int, evaluation_set: EvaluationSet, entry: EnvironmentEntry
    ) -> EvaluationResult:
        """Return the evaluation in a file; if it is missing or cannot be used, play the evaluation set and write the file.

        Args:
            name: name of the file (:func:`evaluation_file`, :func:`set_file`).
            iteration: iterations trained so far.
            evaluation_set: the tasks.
            entry: the environment.
        """
        path = self.folder / name
        result = self._load_or_set_aside(path, self.protocol(evaluation_set, entry))
        if result is None:
            result = self.play(evaluation_set, entry)
            result.policy = f"{self.run}, iteration {iteration}"
            result.labels = {**self.labels, "iteration": iteration}
            result.save(path)
        self._print_result(path, result)
        return result

    def _load_or_set_aside(self, path: Path, protocol: Json) -> EvaluationResult | None:
        """Return the evaluation in a file; ``None`` if the file is missing or cannot be used.

        A file that is damaged, or whose evaluation had other settings (``protocol``), is renamed.
        """
        if not path.exists():
            return None
        try:
            result = EvaluationResult.load(path)
            require_same_protocol(result.protocol, protocol, ("there", "now"))
        except UserInputError as error:
            aside = set_aside(path, "replaced")
            self.print_line(f"{path} is set aside as {aside}: {error}")
            return None
        return result

    def _print_result(self, path: Path, result: EvaluationResult) -> None:
        self.print_line(f"evaluation {path.stem.replace('_', ' ')}: success {result.overall}")

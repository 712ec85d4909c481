"""Evaluations in a run folder: the name of a file says of which iteration it is and what was played, here and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.evaluation.comparison import (
    ComparisonError,
    PairedComparison,
    paired_comparison,
    require_same_protocol,
)
from trial_ray.evaluation.results import EvaluationFileError, EvaluationResult
from trial_ray.files import set_aside

if TYPE_CHECKING:
    from trial_ray.environments.registry import EnvironmentEntry
    from trial_ray.evaluation.panels import Panel

BEFORE, AFTER = "before", "after"
_TRAINED = re.compile(r"(.+)_([0-9]{6,})")


def panel_file(environment: str, iteration: int) -> str:
    """Name of the file of an evaluation set that is played before and after training.

    Args:
        environment: name of the evaluation set's environment; empty where the run has a single evaluation set.
        iteration: iterations trained; 0 before training.
    """
    when = AFTER if iteration else BEFORE
    name = f"{when}_{environment}" if environment else when
    return set_file(name, iteration) if iteration else f"{name}.json"


def set_file(name: str, iteration: int) -> str:
    """Name of the file of an evaluation set that is played at the end alone."""
    return f"{name}_{iteration:06d}.json"


def read_name(file: Path) -> tuple[str, int] | None:
    """Environment (empty for the only evaluation set) or set, and iteration of a file; ``None`` without an iteration."""
    when, _, environment = file.stem.partition("_")
    if when == BEFORE:
        return environment, 0
    found = _TRAINED.fullmatch(file.stem)
    if found is None:
        return None
    when, _, environment = found[1].partition("_")
    return environment if when == AFTER else found[1], int(found[2])


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Why the success after training is not compared with that before."""

    not_compared: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compare_with_beginning(before: EvaluationResult | None, after: EvaluationResult) -> PairedComparison | NotCompared:
    """The paired comparison of an evaluation set's evaluations, or why there is none: a result too, for which no run fails."""
    if before is None:
        return NotCompared("There was no evaluation before training.")
    try:
        return paired_comparison(before, after)
    except ComparisonError as error:
        return NotCompared(str(error))


@dataclass(frozen=True, slots=True)
class RunEvaluations:
    """Plays the evaluation sets of a run once each, and keeps the results in its folder.

    Attributes:
        folder: of the run's evaluations.
        run: name of the run.
        labels: of the results (:attr:`EvaluationResult.labels`).
        protocol: of playing an evaluation set in an environment.
        play: plays it with the policy as it is now.
        tell: called with every line for the user.
    """

    folder: Path
    run: str
    labels: Mapping[str, Any]
    protocol: Callable[[Panel, EnvironmentEntry], dict[str, Any]]
    play: Callable[[Panel, EnvironmentEntry], EvaluationResult]
    tell: Callable[[str], None]

    def before(
        self, environment: str, iteration: int, panel: Panel, entry: EnvironmentEntry
    ) -> EvaluationResult | None:
        """The evaluation before training; a run that has trained for iterations already has recorded it or lacks it.

        Another protocol than that of the evaluation to come is reported now, rather than after training.
        """
        name = panel_file(environment, 0)
        if not iteration:
            return self.after(name, 0, panel, entry)
        path = self.folder / name
        if not path.exists():
            self.tell("there was no evaluation before training, so before and after will not be compared")
            return None
        try:
            result = EvaluationResult.load(path)
            self._tell_result(path, result)
            require_same_protocol(result.protocol, self.protocol(panel, entry))
        except EvaluationFileError as error:
            self.tell(f"before and after training will not be compared: {error}")
            return None
        except ComparisonError as error:
            self.tell(f"before and after training will not be compared: {error}")
        return result

    def after(self, name: str, iteration: int, panel: Panel, entry: EnvironmentEntry) -> EvaluationResult:
        """The evaluation in a file, played now unless the file holds it.

        Args:
            name: of the file (:func:`panel_file`, :func:`set_file`).
            iteration: iterations trained so far.
            panel: the tasks.
            entry: what they are played in.
        """
        path = self.folder / name
        result = self._load_or_set_aside(path, self.protocol(panel, entry))
        if result is None:
            result = self.play(panel, entry)
            result.policy = f"{self.run}, iteration {iteration}"
            result.labels = {**self.labels, "iteration": iteration}
            result.save(path)
        self._tell_result(path, result)
        return result

    def _load_or_set_aside(self, path: Path, protocol: dict[str, Any]) -> EvaluationResult | None:
        """The evaluation in a file, ``None`` without one; a damaged file and one of another protocol are renamed."""
        if not path.exists():
            return None
        try:
            result = EvaluationResult.load(path)
            require_same_protocol(result.protocol, protocol, ("there", "now"))
        except (EvaluationFileError, ComparisonError) as error:
            aside = set_aside(path, "replaced")
            self.tell(f"{path} is set aside as {aside}: {error}")
            return None
        return result

    def _tell_result(self, path: Path, result: EvaluationResult) -> None:
        self.tell(f"evaluation {path.stem.replace('_', ' ')}: success {result.overall}")

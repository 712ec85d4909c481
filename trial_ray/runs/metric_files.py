"""Measurements of a run in files: metrics of iterations, names of metrics, and evaluations."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_names, method_of
from trial_ray.errors import ConfigError, UserInputError
from trial_ray.evaluation.comparison import (
    ComparisonError,
    PairedComparison,
    paired_comparison,
    require_same_protocol,
)
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import checked_content, read_lines, set_aside
from trial_ray.metrics import EVALUATION, METRICS, table_key

if TYPE_CHECKING:
    from trial_ray.adapters.registry import EnvironmentEntry
    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.evaluation.evaluation_sets import EvaluationSet


def flatten(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a nested result under ``/``-joined keys; other values are omitted."""
    flat: dict[str, float] = {}
    for name, value in _leaves(result):
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            flat[name] = int(number) if isinstance(value, int) else number
    return flat


def _leaves(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested result, except strings and the config, under ``/``-joined keys."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config":
                yield from _leaves(value, f"{prefix}{key}/")
        elif not isinstance(value, str | bytes):
            yield f"{prefix}{key}", value


def kept_lines(file: Path, iteration: int) -> list[str]:
    """Return the lines of a ``metrics.jsonl`` up to an iteration, without later lines and a line truncated by a crash."""
    return [line + "\n" for number, line, _ in _whole_lines(read_lines(file)) if number <= iteration]


def recorded_metrics(file: Path, iteration: int) -> dict[str, float]:
    """Return an iteration's metrics from a ``metrics.jsonl``; empty if missing."""
    return {number: metrics for number, _, metrics in _lines_of(file)}.get(iteration, {})


def recorded_iterations(file: Path) -> list[int]:
    """Return the iterations in a ``metrics.jsonl``; empty if there is no file."""
    return [number for number, _, _ in _lines_of(file)]


LARGEST = 1e150
"""Largest magnitude for finite sums and squares: means and intervals of such numbers can be computed and drawn."""


def read_metrics(file: Path) -> tuple[list[dict[str, float]], int]:
    """Return the iterations of a ``metrics.jsonl`` in order, and the number of unreadable lines (truncated by a kill, for example).

    If an iteration occurs twice, the later line is used. Values that are not numbers, or exceed :data:`LARGEST`, are omitted.

    Raises:
        CheckpointError: the file is missing.
    """
    with checked_content(file):
        lines = read_lines(file)
    found: dict[int, dict[str, float]] = {}
    whole = list(_whole_lines(lines))
    for iteration, _, metrics in whole:
        found[iteration] = {key: value for key, value in metrics.items() if _is_number(value)}
    return [found[iteration] for iteration in sorted(found)], len(lines) - len(whole)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _lines_of(file: Path) -> Iterator[tuple[int, str, dict[str, float]]]:
    return _whole_lines(read_lines(file) if file.is_file() else [])


def _whole_lines(lines: Sequence[str]) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Iteration, text and values of every line that can be read."""
    for line in lines:
        try:
            metrics = json.loads(line)
            number = metrics["iteration"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(number) is int:
            yield number, line, metrics


NEAR = 0.8
"""Minimum similarity, between 0 and 1, for a part of a name to count as a misspelling of another."""


def check_metric(name: str, role: str, config: GRPOConfig) -> None:
    """Reject a misspelled metric name before anything runs; a name that is only unknown may belong to a method.

    Args:
        name: ``/``-joined key of a result.
        role: use of the name, for the message.
        config: config of the trials.

    Raises:
        ConfigError: it is a misspelling of a known name, or belongs to an evaluation set that is never played.
    """
    if name.startswith(EVALUATION) and not (config.evaluation_interval and config.evaluation_split):
        raise ConfigError(
            f"{role} is {name!r}, but there is no evaluation while training: set .evaluation(evaluation_split=...) and "
            ".evaluation(evaluation_interval=1)."
        )
    if table_key(name) in METRICS or (name.startswith("learners/") and method_of(config) not in method_names()):
        return
    if near := [known for known in METRICS if _misspelt(name, known)]:
        raise ConfigError(f"{role} is {name!r}, which is not logged. Did you mean {_either(near)}?")


def check_reported(name: str, role: str, result: Mapping[str, Any]) -> None:
    """Reject a name that is missing in a trial's first result, except names of evaluation metrics, which may come later.

    Args:
        name: ``/``-joined key.
        role: use of the name, for the message.
        result: nested, as an algorithm's ``train()`` returns it.

    Raises:
        ConfigError: the name is missing; the message names the nearest keys of the result.
    """
    keys = {key for key, _ in _leaves(result)}
    if name in keys or name.startswith(EVALUATION):
        return
    last = name.rpartition("/")[2]
    near = [key for key in sorted(keys) if key.rpartition("/")[2] == last]
    near += [key for key in difflib.get_close_matches(name, sorted(keys), n=3, cutoff=0.6) if key not in near]
    hint = f" Did you mean {_either(near[:3])}?" if near else " docs/metrics.md lists what is logged."
    raise ConfigError(f"{role} is {name!r}, which is not in a trial's result.{hint}")


def _misspelt(name: str, known: str) -> bool:
    """Return True if both names have the same number of parts, each similar to its counterpart."""
    parts, others = name.split("/"), known.split("/")
    return len(parts) == len(others) and all(
        part == other or difflib.SequenceMatcher(None, part, other).ratio() >= NEAR
        for part, other in zip(parts, others, strict=True)
    )


def _either(names: list[str]) -> str:
    return " or ".join(repr(name) for name in names)


# -- evaluations ----------------------------------------------------------------------------------------------------------

BEFORE, AFTER = "before", "after"
_TRAINED = re.compile(r"(.+)_([0-9]{6,})")


def evaluation_file(environment: str, iteration: int) -> str:
    """Return the name of the file of an evaluation set that is played before and after training.

    Args:
        environment: name of the evaluation set's environment; empty if the run has a single evaluation set.
        iteration: number of trained iterations; 0 before training.
    """
    when = AFTER if iteration else BEFORE
    name = f"{when}_{environment}" if environment else when
    return set_file(name, iteration) if iteration else f"{name}.json"


def set_file(name: str, iteration: int) -> str:
    """Return the name of the file of an evaluation set that is played only at the end."""
    return f"{name}_{iteration:06d}.json"


def read_name(file: Path) -> tuple[str, int] | None:
    """Return environment (empty for the only evaluation set) or set, and iteration of a file; ``None`` without an iteration."""
    when, _, environment = file.stem.partition("_")
    if when == BEFORE:
        return environment, 0
    found = _TRAINED.fullmatch(file.stem)
    if found is None:
        return None
    when, _, environment = found[1].partition("_")
    return environment if when == AFTER else found[1], int(found[2])


def compare_with_beginning(before: EvaluationResult | None, after: EvaluationResult) -> PairedComparison | str:
    """Return the paired comparison of the evaluations before and after training, or the reason why there is no comparison.

    A missing comparison is not an error of the run.
    """
    if before is None:
        return "There was no evaluation before training."
    try:
        return paired_comparison(before, after)
    except ComparisonError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class RunEvaluations:
    """Plays each evaluation set of a run once, and stores the results in the run's folder.

    Attributes:
        folder: folder of the run's evaluations.
        run: name of the run.
        labels: labels of the results (:attr:`EvaluationResult.labels`).
        protocol: returns the protocol of an evaluation set in an environment.
        play: plays an evaluation set with the current policy.
        tell: called with every line for the user.
    """

    folder: Path
    run: str
    labels: Mapping[str, Any]
    protocol: Callable[[EvaluationSet, EnvironmentEntry], dict[str, Any]]
    play: Callable[[EvaluationSet, EnvironmentEntry], EvaluationResult]
    tell: Callable[[str], None]

    def before(
        self, environment: str, iteration: int, evaluation_set: EvaluationSet, entry: EnvironmentEntry
    ) -> EvaluationResult | None:
        """Return the evaluation before training; if the run has trained iterations already, the recorded evaluation or ``None``.

        If its protocol differs from the protocol of the evaluation after training, this is reported now instead of at the end.
        """
        name = evaluation_file(environment, 0)
        if not iteration:
            return self.after(name, 0, evaluation_set, entry)
        path, result = self.folder / name, None
        if not path.exists():
            self.tell("there was no evaluation before training, so before and after will not be compared")
            return None
        try:
            result = EvaluationResult.load(path)
            self._tell_result(path, result)
            require_same_protocol(result.protocol, self.protocol(evaluation_set, entry))
        except UserInputError as error:
            self.tell(f"before and after training will not be compared: {error}")
        return result

    def after(
        self, name: str, iteration: int, evaluation_set: EvaluationSet, entry: EnvironmentEntry
    ) -> EvaluationResult:
        """Return the evaluation in a file; play it now unless the file contains it.

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
        self._tell_result(path, result)
        return result

    def _load_or_set_aside(self, path: Path, protocol: dict[str, Any]) -> EvaluationResult | None:
        """Return the evaluation in a file, ``None`` if missing; a damaged file or a file with another protocol is renamed."""
        if not path.exists():
            return None
        try:
            result = EvaluationResult.load(path)
            require_same_protocol(result.protocol, protocol, ("there", "now"))
        except UserInputError as error:
            aside = set_aside(path, "replaced")
            self.tell(f"{path} is set aside as {aside}: {error}")
            return None
        return result

    def _tell_result(self, path: Path, result: EvaluationResult) -> None:
        self.tell(f"evaluation {path.stem.replace('_', ' ')}: success {result.overall}")

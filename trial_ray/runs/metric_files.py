"""Metrics of a run on disk, and the names that it logs."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_names, method_of
from trial_ray.errors import ConfigError
from trial_ray.files import read_lines
from trial_ray.metrics import EVALUATION, METRICS

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig


def flatten(result: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a nested result, under ``/``-joined keys; everything else is left out."""
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
    """Leaves of a nested result besides texts and the config, under ``/``-joined keys."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            if key != "config":
                yield from _leaves(value, f"{prefix}{key}/")
        elif not isinstance(value, str | bytes):
            yield f"{prefix}{key}", value


def kept_lines(file: Path, iteration: int) -> list[str]:
    """Lines of a ``metrics.jsonl`` up to an iteration; later ones, and one that a crash cut, are left out."""
    return [line for number, line, _ in _whole_lines(file) if number <= iteration]


def recorded_metrics(file: Path, iteration: int) -> dict[str, float]:
    """An iteration's line of a ``metrics.jsonl``; empty where it has none."""
    found = [metrics for number, _, metrics in _whole_lines(file) if number == iteration] if file.is_file() else []
    return found[-1] if found else {}


def recorded_iterations(file: Path) -> list[int]:
    """The iterations that a ``metrics.jsonl`` holds; none where there is no file."""
    return [number for number, _, _ in _whole_lines(file)] if file.is_file() else []


def metrics_line(iteration: int, metrics: Mapping[str, float]) -> str:
    """A line of a ``metrics.jsonl``."""
    return json.dumps({"iteration": iteration, **metrics}, allow_nan=False) + "\n"


def _whole_lines(file: Path) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Iteration, text and values of every line that can be read."""
    for line in read_lines(file):
        try:
            metrics = json.loads(line)
            number = metrics["iteration"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(number) is int:
            yield number, line + "\n", metrics


class MetricWriters:
    """Writes every iteration's metrics to a ``metrics.jsonl`` and to TensorBoard.

    Args:
        metrics: file of lines; ``RunFolder.drop_records_after`` has dropped the later ones.
        tensorboard: folder of events.
        after_iteration: from which training continues, so that TensorBoard drops later ones.
    """

    def __init__(self, metrics: Path, tensorboard: Path, after_iteration: int = 0) -> None:
        from tensorboardX import SummaryWriter

        self._lines = open(metrics, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        self._events = SummaryWriter(str(tensorboard), purge_step=after_iteration + 1)

    def write(self, iteration: int, result: dict[str, Any]) -> dict[str, float]:
        """Write one iteration; return its flat metrics."""
        flat = flatten(result)
        self._lines.write(metrics_line(iteration, flat))
        self._lines.flush()
        for name, value in flat.items():
            self._events.add_scalar(name, value, iteration)
        self._events.flush()
        return flat

    def close(self) -> None:
        """Close both files."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> MetricWriters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


NEAR = 0.8
"""Similarity, between 0 and 1, from which a part of a name is taken for a misspelling of another."""


def check_metric(name: str, role: str, config: GRPOConfig) -> None:
    """Refuse, before anything runs, a name that is surely wrong; one that is merely unknown may be a method's own.

    Args:
        name: ``/``-joined key of a result.
        role: what the name is for, for the message.
        config: of the trials.

    Raises:
        ConfigError: it is a misspelling of a known name, or of an evaluation set that is never played.
    """
    if name.startswith(EVALUATION) and not (config.evaluation_interval and config.evaluation_split):
        raise ConfigError(
            f"{role} is {name!r}, but there is no evaluation while training: set .evaluation(evaluation_split=...) and "
            ".evaluation(evaluation_interval=1)."
        )
    if name in METRICS or (name.startswith("learners/") and method_of(config) not in method_names()):
        return
    if near := [known for known in METRICS if _misspelt(name, known)]:
        raise ConfigError(f"{role} is {name!r}, which nothing logs. Did you mean {_either(near)}?")


def check_reported(name: str, role: str, result: Mapping[str, Any]) -> None:
    """Refuse a name that a trial's first result does not hold; what an evaluation set gives may come later.

    Args:
        name: ``/``-joined key.
        role: what the name is for, for the message.
        result: nested, as an algorithm's ``train()`` returns it.

    Raises:
        ConfigError: names the nearest keys of the result.
    """
    keys = {key for key, _ in _leaves(result)}
    if name in keys or name.startswith(EVALUATION):
        return
    last = name.rpartition("/")[2]
    near = [key for key in sorted(keys) if key.rpartition("/")[2] == last]
    near += [key for key in difflib.get_close_matches(name, sorted(keys), n=3, cutoff=0.6) if key not in near]
    hint = f" Did you mean {_either(near[:3])}?" if near else " docs/methods.md lists what is logged."
    raise ConfigError(f"{role} is {name!r}, which a trial's result does not hold.{hint}")


def _misspelt(name: str, known: str) -> bool:
    """Whether both have the same number of parts, each like its counterpart."""
    parts, others = name.split("/"), known.split("/")
    return len(parts) == len(others) and all(
        part == other or difflib.SequenceMatcher(None, part, other).ratio() >= NEAR
        for part, other in zip(parts, others, strict=True)
    )


def _either(names: list[str]) -> str:
    return " or ".join(repr(name) for name in names)

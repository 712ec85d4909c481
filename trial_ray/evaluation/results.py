"""Evaluation results: episodes, rates, table and JSON; and the file beside it from which an interrupted evaluation continues."""

from __future__ import annotations

import fcntl
import json
import math
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from trial_ray.config.run import EARLIER_CHAT_TEMPLATE_KWARGS
from trial_ray.errors import CheckpointError, InfrastructureError
from trial_ray.evaluation.statistics import wilson_interval
from trial_ray.files import checked_content, finite, read_json, require_file, write_json, writing
from trial_ray.rollout.trajectory import EpisodeResult

_KINDS: dict[str, Any] = {
    "task_id": str,
    "family": str,
    "success": bool,
    "score": float | int,
    "turns": int,
    "ended": str,
}
"""Types of an episode's values in JSON."""
_TYPES = {"protocol": dict, "episodes": list, "policy": str, "weights": str, "labels": dict}
"""Types of an evaluation's own values."""

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.rollout.groups import RolloutCounts

CHAT_TEMPLATE = "chat_template"
"""In a protocol: digest of what the policy's chat template writes, its arguments, and the day that it shows, if any."""
SCHEMA = "trial_ray/evaluation"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Rate:
    """A success rate with its 95 % Wilson interval; ``rate`` is NaN without episodes."""

    successes: int
    episodes: int
    score: float
    turns: float

    @classmethod
    def of(cls, episodes: Iterable[EpisodeResult]) -> Rate:
        """The rate over episodes that none failed; score and turns are NaN without any."""
        kept = list(episodes)
        score, turns = (
            np.mean([getattr(episode, name) for episode in kept] or math.nan) for name in ("score", "turns")
        )
        return cls(sum(episode.success for episode in kept), len(kept), float(score), float(turns))

    @property
    def rate(self) -> float:
        """Share of episodes that succeeded, in [0, 1]."""
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the share."""
        return wilson_interval(self.successes, self.episodes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "successes": self.successes,
            "episodes": self.episodes,
            "success_rate": self.rate,
            "interval_95": list(self.interval),
            "score_mean": self.score,
            "turns_mean": self.turns,
        }

    def __str__(self) -> str:
        if not self.episodes:
            return "no episode"
        low, high = self.interval
        return f"{self.rate:.1%} [{low:.1%}, {high:.1%}] ({self.successes}/{self.episodes})"


@dataclass(slots=True)
class EvaluationResult:
    """Episodes that were all played under one protocol.

    Episodes that an infrastructure error ended are kept and counted in :attr:`num_failed`, but enter no rate: they say
    nothing about the policy.

    Attributes:
        protocol: everything but the policy that decides the result (environment, split, evaluation set, sampling, limits);
            two evaluations are comparable when theirs are equal. JSON values only.
        episodes: in the order of the evaluation set.
        policy: what was evaluated, for example a checkpoint's path; not part of the protocol.
        weights: checksum of the weights that were played (:func:`trial_ray.engines.weights.weights_checksum`);
            empty for players without any, and where a training run evaluated itself.
        labels: what a table sorts evaluations by: ``method``, ``backbone``, ``seed`` and ``iteration`` (how many the policy was
            trained for), where they are known.
        counts: of the rollouts that were played for it in this process; not saved.
    """

    protocol: dict[str, Any]
    episodes: list[EpisodeResult] = field(default_factory=list)
    policy: str = ""
    weights: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    counts: RolloutCounts | None = field(default=None, compare=False, repr=False)

    @property
    def counted(self) -> list[EpisodeResult]:
        """Episodes that say something about the policy."""
        return [episode for episode in self.episodes if not episode.failed]

    @property
    def num_failed(self) -> int:
        """Episodes that an infrastructure error ended."""
        return len(self.episodes) - len(self.counted)

    @property
    def overall(self) -> Rate:
        """Rate over all counted episodes."""
        return Rate.of(self.counted)

    @property
    def success_rate(self) -> float:
        """Share of counted episodes that succeeded, in [0, 1]; NaN without episodes."""
        return self.overall.rate

    def per_family(self) -> dict[str, Rate]:
        """Rate of every family, by name in alphabetical order."""
        names = sorted({episode.family for episode in self.counted})
        return {name: Rate.of(episode for episode in self.counted if episode.family == name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the summary is for readers, and is not read back."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in ("policy", "weights", "labels", "protocol")},
            "summary": finite(
                {
                    **self.overall.to_dict(),
                    "failed_episodes": self.num_failed,
                    "per_family": {name: rate.to_dict() for name, rate in self.per_family().items()},
                }
            ),
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    def save(self, path: Path | str) -> Path:
        """Write the evaluation as JSON; the file is whole or absent."""
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> EvaluationResult:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing, no JSON, or not an evaluation that this version can read.
        """
        file = Path(path)
        value = {"policy": "", "weights": "", "labels": {}, **read_json(file, SCHEMA, SCHEMA_VERSION)}
        with checked_content(file):
            _require_types(value, _TYPES)
            value["episodes"] = [
                read_episode(each, f"{file}: Episode {at}") for at, each in enumerate(value["episodes"])
            ]
            value["protocol"] = _completed(value["protocol"])
            return cls(**{name: value[name] for name in _TYPES})

    def table(self, title: str | None = None) -> Table:
        """A rich table: one row a family, and all of them together at the end."""
        from rich.table import Column, Table
        from rich.text import Text

        failed = f"{self.num_failed} episode(s) ended by an infrastructure error are not counted"
        numbers = (Column(name, justify="right") for name in ("episodes", "success", "95 % interval", "score", "turns"))
        table = Table("family", *numbers, title=title and Text(title), caption=failed if self.num_failed else None)
        for name, rate in {**self.per_family(), "all": self.overall}.items():
            low, high = (f"{bound:.1%}" for bound in rate.interval)
            cells = (
                str(rate.episodes),
                f"{rate.rate:.1%}",
                f"{low} – {high}",
                f"{rate.score:.3f}",
                f"{rate.turns:.1f}",
            )
            table.add_row(Text(name), *cells)
        return table


def read_episode(value: Any, name: str) -> EpisodeResult:
    """Read one episode out of JSON.

    Raises:
        CheckpointError: fields are missing or unknown; the message calls the episode ``name``.
    """
    try:
        episode = EpisodeResult(**value)
        _require_types(value, _KINDS)
        if not abs(episode.score) <= sys.float_info.max:  # an int may be too large for a float
            raise ValueError(f"its score is {episode.score!r:.100}, expected a finite number")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from error
    return episode


def _require_types(value: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise TypeError(f"{name} is {value[name]!r:.100}")


def protocol_difference(
    first: dict[str, Any], second: dict[str, Any], where: tuple[str, str] = ("in one", "in another")
) -> str:
    """The alphabetically first entry in which two protocols differ, with both values; empty where they are equal."""
    for key in sorted(first.keys() | second.keys()):
        one, other = first.get(key), second.get(key)
        if key == CHAT_TEMPLATE and one and other:
            one, other = _compared_templates(one, other)
        if one != other:
            return f"{key} is {one!r} {where[0]} and {other!r} {where[1]}"
    return ""


def _compared_templates(first: dict[str, Any], second: dict[str, Any]) -> tuple[Any, Any]:
    """What tells two chat templates apart: what they write, and where one of them is not known, their arguments."""
    if "digest" not in first or "digest" not in second:
        return {"kwargs": first.get("kwargs")}, {"kwargs": second.get("kwargs")}
    return (None, None) if first["digest"] == second["digest"] else (first, second)


def _completed(protocol: dict[str, Any]) -> dict[str, Any]:
    """A recorded protocol, with what earlier versions had in the code."""
    if "prompt_style" not in protocol:  # of a player that writes no prompts
        return protocol
    return {CHAT_TEMPLATE: {"kwargs": EARLIER_CHAT_TEMPLATE_KWARGS}, **protocol}


# -- episodes of an unfinished evaluation -------------------------------------------------------------------------------

JOURNAL_SCHEMA = "trial_ray/unfinished_evaluation"
JOURNAL_VERSION = 1


def partial_path(target: Path) -> Path:
    """Where the episodes of an unfinished evaluation lie."""
    return target.with_name(f"{target.name}.partial")


class EpisodeJournal(ExitStack):
    """Partial results of an evaluation, in memory and beside the result file.

    ``FILE.partial`` is JSON lines: a head with protocol and weights, then an episode a line, each flushed as it is
    written. A line that a crash cut is dropped when the file is opened again. :meth:`finish` writes FILE whole and removes
    the other. Only one process at a time may hold a journal.

    Args:
        target: the result's file; ``None`` keeps everything in memory.
        protocol: of the evaluation.
        weights: checksum of the policy's weights; empty for a player without any.

    Attributes:
        result: what ``target`` holds, where the evaluation was finished before.
        episodes: of an unfinished one, by task.

    Raises:
        CheckpointError: ``target`` or its partial file is of another evaluation, or is none at all.
        UserInputError: ``target`` cannot be written.
        InfrastructureError: another process is writing to it.
    """

    def __init__(self, target: Path | None, protocol: dict[str, Any], weights: str) -> None:
        super().__init__()
        self._target = target
        self._head: dict[str, Any] = {
            "schema": JOURNAL_SCHEMA,
            "schema_version": JOURNAL_VERSION,
            "protocol": protocol,
            "weights": weights,
        }
        self._file: IO[str] | None = None
        self.episodes: dict[str, EpisodeResult] = {}
        self.result: EvaluationResult | None = None
        if target is None:
            return
        require_file(target)
        if target.exists():
            self.result = EvaluationResult.load(target)
            self._require_same(target, self.result.protocol, self.result.weights)
            return
        try:
            self._open(partial_path(target))
        except BaseException:
            self.close()
            raise

    def add(self, episode: EpisodeResult) -> None:
        """Keep an episode that has ended."""
        self.episodes[episode.task_id] = episode
        self._write(asdict(episode))

    def finish(self, result: EvaluationResult) -> None:
        """Write the result in place of the journal."""
        if self._target is not None:
            result.save(self._target)
            partial_path(self._target).unlink(missing_ok=True)
        self.close()

    def _open(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8", newline="")  # noqa: SIM115  closed with the others
            self._file = self.enter_context(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InfrastructureError(f"Another process is writing {path}; wait for it to end.") from error
        except OSError as error:
            raise InfrastructureError(
                f"{path} cannot be locked ({error}); name a file on another file system."
            ) from error
        with checked_content(path):
            file.seek(0)
            whole, newline, rest = file.read().rpartition("\n")  # what follows the last newline was cut
            if newline:
                self._take_in(whole.split("\n"), path)
            elif not json.dumps(self._head).startswith(rest):
                raise ValueError("it is not an unfinished evaluation")
        # Nothing is changed in a file that is not known to be a journal.
        file.truncate(len((whole + newline).encode()))
        if not newline:
            self._write(self._head)

    def _take_in(self, lines: list[str], path: Path) -> None:
        head, *values = map(json.loads, lines)
        if (head["schema"], head["schema_version"]) != (JOURNAL_SCHEMA, JOURNAL_VERSION):
            raise ValueError("it is not an unfinished evaluation of this version")
        self._require_same(path, _completed(head["protocol"]), head["weights"])
        for number, value in enumerate(values, start=2):
            episode = read_episode(value, f"{path}: the episode in line {number}")
            self.episodes[episode.task_id] = episode

    def _write(self, value: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value, allow_nan=False) + "\n")
            self._file.flush()

    def _require_same(self, path: Path, protocol: dict[str, Any], weights: Any) -> None:
        advice = "Name another file, or delete this one to evaluate again."
        if difference := protocol_difference(protocol, self._head["protocol"], ("there", "here")):
            raise CheckpointError(f"{path} has an evaluation with another protocol: {difference}. {advice}")
        if weights != self._head["weights"]:
            raise CheckpointError(f"{path} has an evaluation of another policy (other weights). {advice}")

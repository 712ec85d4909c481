"""Evaluation results: episodes, rates, table and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.errors import UserInputError
from trial_ray.evaluation.statistics import wilson_interval
from trial_ray.files import write_json
from trial_ray.rollout.trajectory import EpisodeResult

_KINDS: dict[str, tuple[type, ...]] = {
    "task_id": (str,),
    "family": (str,),
    "success": (bool,),
    "score": (float, int),
    "turns": (int,),
    "ended": (str,),
}
"""Types of an episode's values in JSON."""
_ABOUT: dict[str, type] = {"policy": str, "weights": str, "labels": dict}
"""Types of an evaluation's other values, which may be absent."""

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "trial_ray/evaluation"
SCHEMA_VERSION = 1


class EvaluationFileError(UserInputError):
    """A file is not an evaluation that this version can read."""


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
        count = len(kept)
        return cls(
            successes=sum(episode.success for episode in kept),
            episodes=count,
            score=sum(episode.score for episode in kept) / count if count else math.nan,
            turns=sum(episode.turns for episode in kept) / count if count else math.nan,
        )

    @property
    def rate(self) -> float:
        """Share of episodes that succeeded, in [0, 1]."""
        return self.successes / self.episodes if self.episodes else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the share."""
        return wilson_interval(self.successes, self.episodes)

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
    """

    protocol: dict[str, Any]
    episodes: list[EpisodeResult] = field(default_factory=list)
    policy: str = ""
    weights: str = ""
    labels: dict[str, Any] = field(default_factory=dict)

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
        """Plain values for JSON; the summary is for readers and is ignored by :meth:`from_dict`."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "policy": self.policy,
            "weights": self.weights,
            "labels": self.labels,
            "protocol": self.protocol,
            "summary": {
                **_summary(self.overall),
                "failed_episodes": self.num_failed,
                "per_family": {name: _summary(rate) for name, rate in self.per_family().items()},
            },
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    @classmethod
    def from_dict(cls, value: Any) -> EvaluationResult:
        """Inverse of :meth:`to_dict`.

        Raises:
            EvaluationFileError: another schema, another version, or fields that are missing or unknown.
        """
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise EvaluationFileError(
                f'Expected JSON with "schema": "{SCHEMA}", as `trial-ray evaluate --json` writes.'
            )
        if value.get("schema_version") != SCHEMA_VERSION:
            raise EvaluationFileError(
                f"Found evaluation schema version {value.get('schema_version')!r}; this code reads {SCHEMA_VERSION}. "
                "Evaluate again with this version."
            )
        episodes = value.get("episodes")
        if not isinstance(value.get("protocol"), dict) or not isinstance(episodes, list):
            raise EvaluationFileError('The evaluation lacks its "protocol" or its "episodes".')
        about = {name: value.get(name, kind()) for name, kind in _ABOUT.items()}
        for name, found in about.items():
            if not isinstance(found, _ABOUT[name]):
                raise EvaluationFileError(f"The evaluation has {name} = {found!r:.100}, which is no such value.")
        episodes = [read_episode(episode, f"Episode {index}") for index, episode in enumerate(episodes)]
        return cls(value["protocol"], episodes, **about)

    def save(self, path: Path | str) -> Path:
        """Write the evaluation as JSON; the file is whole or absent."""
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> EvaluationResult:
        """Read what :meth:`save` wrote.

        Raises:
            EvaluationFileError: the file is missing, no JSON, or not an evaluation.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise EvaluationFileError(f"Cannot read the evaluation {path}: {str(error).rstrip('.')}.") from error

    def table(self, title: str | None = None) -> Table:
        """A rich table: one row a family, and all of them together at the end."""
        from rich.markup import escape
        from rich.table import Table

        caption = None
        if self.num_failed:
            caption = f"{self.num_failed} episode(s) ended by an infrastructure error are not counted"
        table = Table(title=escape(title) if title else None, caption=caption)
        table.add_column("family")
        for header in ("episodes", "success", "95 % interval", "score", "turns"):
            table.add_column(header, justify="right")
        for name, rate in self.per_family().items():
            table.add_row(escape(name), *_cells(rate))
        table.add_section()
        table.add_row("all", *_cells(self.overall), style="bold")
        return table


def read_episode(value: Any, name: str) -> EpisodeResult:
    """Read one episode out of JSON.

    Raises:
        EvaluationFileError: fields are missing or unknown; the message calls the episode ``name``.
    """
    expected = {f.name for f in fields(EpisodeResult)}
    if not isinstance(value, dict) or set(value) != expected:
        raise EvaluationFileError(f"{name} must have exactly the fields {sorted(expected)}.")
    if wrong := [key for key, kinds in _KINDS.items() if type(value[key]) not in kinds]:
        raise EvaluationFileError(f"{name} has {wrong[0]} = {value[wrong[0]]!r:.100}, which is no such value.")
    if not abs(value["score"]) <= sys.float_info.max:  # an int may be too large for a float
        raise EvaluationFileError(f"{name} has the score {value['score']!r:.100}; expected a finite number.")
    return EpisodeResult(**value)


def protocol_difference(
    first: dict[str, Any], second: dict[str, Any], where: tuple[str, str] = ("in one", "in another")
) -> str:
    """The alphabetically first entry in which two protocols differ, with both values; empty where they are equal."""
    key = next((key for key in sorted(first.keys() | second.keys()) if first.get(key) != second.get(key)), None)
    return "" if key is None else f"{key} is {first.get(key)!r} {where[0]} and {second.get(key)!r} {where[1]}"


def _summary(rate: Rate) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {
        "successes": rate.successes,
        "episodes": rate.episodes,
        "success_rate": known(rate.rate),
        "interval_95": list(rate.interval),
        "score_mean": known(rate.score),
        "turns_mean": known(rate.turns),
    }


def _cells(rate: Rate) -> list[str]:
    if not rate.episodes:
        return ["0", "-", "-", "-", "-"]
    low, high = rate.interval
    return [str(rate.episodes), f"{rate.rate:.1%}", f"{low:.1%} – {high:.1%}", f"{rate.score:.3f}", f"{rate.turns:.1f}"]

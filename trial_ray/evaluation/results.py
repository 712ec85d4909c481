"""Stores and shows the results of an evaluation, computes success rates, and keeps the episodes of an unfinished evaluation."""

from __future__ import annotations

import fcntl
import json
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from trial_ray.errors import CheckpointError, InfrastructureError
from trial_ray.evaluation.statistics import pass_at, task_interval, wilson_interval
from trial_ray.files import Json, checked_content, finite, read_json, require_file, text_digest, write_json, writing
from trial_ray.trajectory import EpisodeResult

_KINDS: Json = {
    "task_id": str,
    "family": str,
    "success": bool,
    "score": float | int,
    "turns": int,
    "ended": str,
}
"""Required types of the fields of an episode in JSON."""
_TYPES = {"protocol": dict, "episodes": list, "policy": str, "weights": str, "labels": dict}
"""Required types of the JSON fields that :meth:`EvaluationResult.load` reads."""

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.rollout.groups import RolloutCounts

CHAT_TEMPLATE = "chat_template"
"""Key, in an evaluation protocol, of the chat template: digest of its output, its arguments, and the date that it shows, if any."""
UNCONTROLLED = "uncontrolled"
"""Key, in an evaluation protocol, of the server settings whose values are unknown; comparisons of protocols ignore this key."""
SCHEMA = "trial_ray/evaluation"
SCHEMA_VERSION = 1


def successes_by_task(episodes: Iterable[EpisodeResult]) -> dict[str, list[bool]]:
    """Return, by task id, whether each episode of the task succeeded."""
    tasks: dict[str, list[bool]] = {}
    for episode in episodes:
        tasks.setdefault(episode.task_id, []).append(episode.success)
    return tasks


@dataclass(frozen=True)
class Rate:
    """Success rate, mean score and mean number of turns of episodes; all three are NaN if there are no episodes.

    ``interval`` is the success rate's 95 % interval: Wilson's, or :func:`task_interval` if tasks have several episodes.
    """

    successes: int
    episodes: int
    score: float
    turns: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, episodes: Iterable[EpisodeResult], rollouts: int = 1) -> Rate:
        """Return the success rate of ``episodes``, which must not include failed ones (:attr:`EpisodeResult.failed`).

        Args:
            episodes: the episodes.
            rollouts: number of episodes that the evaluation's protocol has for each task.
        """
        kept = list(episodes)
        score, turns = (
            float(np.mean([getattr(episode, name) for episode in kept] or math.nan)) for name in ("score", "turns")
        )
        successes, interval = sum(episode.success for episode in kept), (0.0, 1.0)
        if rollouts == 1:
            interval = wilson_interval(successes, len(kept))
        elif kept:
            interval = task_interval([*map(fmean, successes_by_task(kept).values())])
        return cls(successes, len(kept), score, turns, interval)

    @property
    def rate(self) -> float:
        """Share of episodes that succeeded, in [0, 1]; NaN without episodes."""
        return self.successes / self.episodes if self.episodes else math.nan

    def to_dict(self) -> Json:
        """Return plain values for JSON."""
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


@dataclass
class EvaluationResult:
    """Episodes that were played under the same evaluation protocol.

    Episodes that an infrastructure error ended are kept and counted in :attr:`num_failed`, but are excluded from all rates,
    because such errors do not depend on the policy.

    Attributes:
        protocol: all settings that determine the result besides the policy (environment, split, evaluation set, sampling,
            limits), as JSON values. Two evaluations are comparable if their protocols are equal.
        episodes: episodes in the order of the evaluation set; the episodes of one task are consecutive.
        policy: name of the evaluated policy, for example a checkpoint's path; not part of the protocol.
        weights: checksum of the evaluated weights (:func:`trial_ray.engines.weights.weights_checksum`), or a name for an expert
            or a chat endpoint; empty if the environment's own solutions were played, or if a training run evaluated its policy.
        labels: labels for tables, if available: ``method``, ``backbone``, ``seed`` and ``iteration`` (number of iterations
            that the policy was trained for).
        counts: sums over the rollouts that were played in this process; not saved.
    """

    protocol: Json
    episodes: list[EpisodeResult] = field(default_factory=list)
    policy: str = ""
    weights: str = ""
    labels: Json = field(default_factory=dict)
    counts: RolloutCounts | None = field(default=None, compare=False, repr=False)

    @property
    def counted(self) -> list[EpisodeResult]:
        """Episodes that were not ended by an infrastructure error."""
        return [episode for episode in self.episodes if not episode.failed]

    @property
    def num_failed(self) -> int:
        """Number of episodes that an infrastructure error ended."""
        return len(self.episodes) - len(self.counted)

    @property
    def rollouts(self) -> int:
        """Number of episodes of each task, according to the protocol."""
        return int(self.protocol.get("rollouts", 1))

    @property
    def overall(self) -> Rate:
        """Rate over all counted episodes."""
        return Rate.of(self.counted, self.rollouts)

    @property
    def success_rate(self) -> float:
        """Share of counted episodes that succeeded, in [0, 1]; NaN without episodes."""
        return self.overall.rate

    def per_family(self) -> dict[str, Rate]:
        """Return the rate of every task family, by the family's name, in alphabetical order."""
        names = sorted({episode.family for episode in self.counted})
        return {
            name: Rate.of((episode for episode in self.counted if episode.family == name), self.rollouts)
            for name in names
        }

    def pass_at(self) -> list[tuple[float, tuple[float, float]]]:
        """Return pass@1 to pass@K for K episodes of each task, each with its 95 % interval over tasks; empty for K = 1."""
        tasks = [*successes_by_task(self.counted).values()]
        max_k = min(map(len, tasks), default=0) if self.rollouts > 1 else 0
        rows = [[pass_at(sum(task), len(task), k) for task in tasks] for k in range(1, max_k + 1)]
        return [(fmean(row), task_interval(row)) for row in rows]

    def to_dict(self) -> Json:
        """Return the evaluation as JSON values; :meth:`load` ignores the ``summary``, which follows from the episodes."""
        several = [
            {"k": k, "mean": mean, "interval_95": list(bounds)} for k, (mean, bounds) in enumerate(self.pass_at(), 1)
        ]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in ("policy", "weights", "labels", "protocol")},
            "summary": finite(
                {
                    **self.overall.to_dict(),
                    "failed_episodes": self.num_failed,
                    "per_family": {name: rate.to_dict() for name, rate in self.per_family().items()},
                    **({"pass_at": several} if several else {}),
                }
            ),
            "episodes": [asdict(episode) for episode in self.episodes],
        }

    def save(self, path: Path | str) -> Path:
        """Write the evaluation as JSON, atomically."""
        return write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path | str) -> EvaluationResult:
        """Read a file that :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing, not JSON, or not an evaluation that this version can read.
        """
        file = Path(path)
        value = {"policy": "", "weights": "", "labels": {}, **read_json(file, SCHEMA, SCHEMA_VERSION)}
        with checked_content(file):
            _require_types(value, _TYPES)
            value["episodes"] = [
                read_episode(episode, f"{file}: Episode {index}") for index, episode in enumerate(value["episodes"])
            ]
            return cls(**{name: value[name] for name in _TYPES})

    def table(self, title: str | None = None) -> Table:
        """Return a rich table with one row per family and a last row for all episodes."""
        from rich.table import Column, Table
        from rich.text import Text

        failed = f"{self.num_failed} episode(s) ended by an infrastructure error are not counted"
        numbers = (Column(name, justify="right") for name in ("episodes", "success", "95 % interval", "score", "turns"))
        table = Table("family", *numbers, title=title and Text(title), caption=failed if self.num_failed else None)
        for name, rate in {**self.per_family(), "all": self.overall}.items():
            table.add_row(
                Text(name),
                str(rate.episodes),
                f"{rate.rate:.1%}",
                "{:.1%} – {:.1%}".format(*rate.interval),
                f"{rate.score:.3f}",
                f"{rate.turns:.1f}",
            )
        for k, (mean, bounds) in enumerate(self.pass_at(), 1):
            table.add_row(f"pass@{k}", "", f"{mean:.1%}", "{:.1%} – {:.1%}".format(*bounds), "", "")
        return table


def protocol_card(result: EvaluationResult) -> dict[str, str]:
    """Return lines of text, by title, about the settings that determine a success rate besides the weights."""
    known = result.protocol

    def line(text: str, *names: str) -> str:
        """Fill the placeholders of ``text`` with the entries ``names`` of the evaluation protocol; return "" if one is missing."""
        return text.format(*(known[name] for name in names)) if known.keys() >= {*names} else ""

    several = f", {result.rollouts} episodes each" if result.rollouts > 1 else ""
    template = known.get(CHAT_TEMPLATE, {})
    digest = template["digest"][:12] if "digest" in template else "of the server"
    described = {**template.get("kwargs", {}), **{name: known[name] for name in ("tool_format",) if name in known}}
    decoding = line(
        "temperature {}, top_p {}, seed {}, at most {} tokens",
        *("temperature", "top_p", "sampling_seed", "max_response_tokens"),
    )
    stops = "".join(f", stop {text!r}" for text in known.get("stop_strings", ()))
    lines = {
        "tasks": line(
            "{} of {}, split {}" + several + "; digest {!s:.12}", "num_tasks", "env", "split", "panel_sha256"
        ),
        "environment": _settings(known.get("env_config", {})),
        "env adapter": _digest_of(known["adapter"]) if "adapter" in known else "",
        "episodes": line("at most {} turns", "max_turns"),
        "policy": _settings({name: value for name, value in result.labels.items() if value is not None}),
        "prompts": line("{}, {} past turns, at most {} tokens", "prompt_style", "history_window", "max_prompt_tokens"),
        "chat template": f"{digest}  {_settings(described)}".rstrip() if CHAT_TEMPLATE in known else "",
        "decoding": decoding and decoding + stops,
    }
    return {title: text for title, text in lines.items() if text}


def _digest_of(adapter: Json) -> str:
    return f"not the built-in one, digest {text_digest(json.dumps(adapter, sort_keys=True)).hex()[:12]}"


def _settings(values: Json) -> str:
    return ", ".join(f"{name}={value!r:.80}" for name, value in values.items())


def read_episode(value: Any, name: str) -> EpisodeResult:
    """Read one episode from JSON values.

    Raises:
        CheckpointError: fields are missing, unknown or invalid; the message refers to the episode as ``name``.
    """
    try:
        episode = EpisodeResult(**value)
        _require_types(value, _KINDS)
        if not abs(episode.score) <= sys.float_info.max:  # An int may exceed the largest float.
            raise ValueError(f"its score is {episode.score!r:.100}, expected a finite number")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from error
    return episode


def _require_types(value: Json, kinds: Json) -> None:
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise TypeError(f"{name} is {value[name]!r:.100}")


def protocol_difference(first: Json, second: Json, where: tuple[str, str] = ("in one", "in another")) -> str:
    """Describe the alphabetically first entry that differs between two evaluation protocols; empty if they are equal.

    Args:
        first: a protocol.
        second: another protocol.
        where: phrases that refer to the first and to the second protocol in the description.
    """
    for key in sorted((first.keys() | second.keys()) - {UNCONTROLLED}):
        value, other = first.get(key), second.get(key)
        if key == CHAT_TEMPLATE and value and other:
            value, other = _compared_templates(value, other)
        if value != other:
            return f"{key} is {value!r} {where[0]} and {other!r} {where[1]}"
    return ""


def _compared_templates(first: Json, second: Json) -> tuple[Any, Any]:
    """Return two values that are equal if two chat templates match: by digest or, if a digest is missing, by arguments."""
    if "digest" not in first or "digest" not in second:
        return {"kwargs": first.get("kwargs")}, {"kwargs": second.get("kwargs")}
    return (None, None) if first["digest"] == second["digest"] else (first, second)


# -- episodes of an unfinished evaluation -------------------------------------------------------------------------------

JOURNAL_SCHEMA = "trial_ray/unfinished_evaluation"
JOURNAL_VERSION = 1


def partial_path(target: Path) -> Path:
    """Return the path of the file with the episodes of an unfinished evaluation."""
    return target.with_name(f"{target.name}.partial")


class EpisodeJournal(ExitStack):
    """Partial results of an evaluation, in memory and in a file next to the result file.

    For a result file ``FILE``, ``FILE.partial`` has JSON lines: a header with protocol and weights, then one line per episode.
    A line that a crash truncated is dropped when the file is opened again. :meth:`finish` writes ``FILE`` and removes
    ``FILE.partial``. Only one process at a time can open ``FILE.partial``.

    Args:
        target: path of the result file; ``None`` keeps everything in memory.
        protocol: protocol of the evaluation.
        weights: identifies the policy; see :attr:`EvaluationResult.weights`.
        may_drop: called if the evaluation ends without an episode; returns whether the header is removed.

    Attributes:
        result: the result in ``target`` if an earlier process finished the evaluation; else ``None``.
        episodes: episodes of an unfinished evaluation, by task; tasks with too few episodes are not read from the file.

    Raises:
        CheckpointError: ``target`` or its partial file belongs to another evaluation or is not an evaluation.
        UserInputError: ``target`` cannot be written.
        InfrastructureError: another process is writing the partial file.
    """

    def __init__(
        self, target: Path | None, protocol: Json, weights: str, may_drop: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__()
        self._target, self._may_drop = target, may_drop
        version = {"schema": JOURNAL_SCHEMA, "schema_version": JOURNAL_VERSION}
        self._head: Json = {**version, "protocol": protocol, "weights": weights}
        self._file: IO[str] | None = None
        self.episodes: dict[str, list[EpisodeResult]] = {}
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
        """Add a finished episode; the episodes of a task must be added one after the other."""
        self.episodes.setdefault(episode.task_id, []).append(episode)
        self._write(asdict(episode))

    def finish(self, result: EvaluationResult) -> None:
        """Write the result file and remove the partial file."""
        if self._target is not None:
            result.save(self._target)
            partial_path(self._target).unlink(missing_ok=True)
        self.close()

    def _open(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8", newline="")  # noqa: SIM115  closed by close()
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
            whole, newline, rest = file.read().rpartition("\n")  # A crash may have truncated the file's last line.
            if newline:
                self._read(whole.split("\n"), path)
            elif not json.dumps(self._head).startswith(rest):
                raise ValueError("it is not an unfinished evaluation")
        # Change the file only after the checks above, because it may not be an unfinished evaluation.
        file.truncate(len((whole + newline).encode()))
        if not newline:
            self._write(self._head)
        self.callback(self._drop_header)

    def _read(self, lines: list[str], path: Path) -> None:
        head, *values = map(json.loads, lines)
        if (head["schema"], head["schema_version"]) != (JOURNAL_SCHEMA, JOURNAL_VERSION):
            raise ValueError("it is not an unfinished evaluation of this version")
        self._require_same(path, head["protocol"], head["weights"])
        for number, value in enumerate(values, start=2):
            episode = read_episode(value, f"{path}: the episode in line {number}")
            self.episodes.setdefault(episode.task_id, []).append(episode)
        rollouts = head["protocol"].get("rollouts", 1)
        # Keep the last episodes of a task: a task that a crash interrupted was played again from its first episode.
        self.episodes = {task: known[-rollouts:] for task, known in self.episodes.items() if len(known) >= rollouts}

    def _write(self, value: Json) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value, allow_nan=False) + "\n")
            self._file.flush()

    def _drop_header(self) -> None:
        # Remove the header of an evaluation without episodes, so that the next evaluation may have another protocol.
        if self._file is not None and not self.episodes and self._may_drop():
            self._file.truncate(0)

    def _require_same(self, path: Path, protocol: Json, weights: Any) -> None:
        advice = "Name another file, or delete this one to evaluate again."
        if difference := protocol_difference(protocol, self._head["protocol"], ("there", "here")):
            raise CheckpointError(f"{path} has an evaluation with another protocol: {difference}. {advice}")
        if weights != self._head["weights"]:
            raise CheckpointError(f"{path} has an evaluation of another policy (other weights). {advice}")

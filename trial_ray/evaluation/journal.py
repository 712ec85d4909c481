"""Episodes of an evaluation as they end: a file beside the result, from which an interrupted evaluation continues."""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from trial_ray.errors import InfrastructureError
from trial_ray.evaluation.results import EvaluationFileError, EvaluationResult, protocol_difference, read_episode
from trial_ray.rollout.trajectory import EpisodeResult

SCHEMA = "trial_ray/unfinished_evaluation"
SCHEMA_VERSION = 1
HEAD_START = json.dumps({"schema": SCHEMA}).removesuffix("}")
"""How the first line begins, which a crash may have cut, too."""


def partial_path(target: Path) -> Path:
    """Where the episodes of an unfinished evaluation lie."""
    return target.with_name(f"{target.name}.partial")


class EpisodeJournal:
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
        EvaluationFileError: ``target`` or its partial file is of another evaluation, or is none at all.
        InfrastructureError: another process is writing to it.
    """

    def __init__(self, target: Path | None, protocol: dict[str, Any], weights: str) -> None:
        self._target = target
        self._head: dict[str, Any] = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "protocol": protocol,
            "weights": weights,
        }
        self._file: IO[str] | None = None
        self.episodes: dict[str, EpisodeResult] = {}
        self.result: EvaluationResult | None = None
        if target is not None and target.exists():
            self.result = EvaluationResult.load(target)
            self._require_same(target, self.result.protocol, self.result.weights)
        elif target is not None:
            self._open(target)

    def add(self, episode: EpisodeResult) -> None:
        """Keep an episode that has ended."""
        self.episodes[episode.task_id] = episode
        if self._file is not None:
            self._write(asdict(episode))

    def finish(self, result: EvaluationResult) -> None:
        """Write the result in place of the journal."""
        if self._target is not None:
            result.save(self._target)
            partial_path(self._target).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the file; what it holds stays for the next attempt."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> EpisodeJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, target: Path) -> None:
        path = partial_path(target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise EvaluationFileError(f"{path} cannot be written ({error}). Name another file.") from error
        try:
            _lock(self._file, path)
            self._file.seek(0)
            whole, newline, rest = self._file.read().rpartition("\n")  # what follows the last newline was cut
            if newline:
                self._take_in(whole.split("\n"), path)
            elif not rest.startswith(HEAD_START) and not HEAD_START.startswith(rest):
                raise EvaluationFileError(f"{path} is no unfinished evaluation; delete it or name another file.")
            # Nothing is changed in a file that is not known to be a journal.
            self._file.truncate(len((whole + newline).encode()))
            if not newline:
                self._write(self._head)
        except BaseException as error:
            self.close()
            if isinstance(error, UnicodeDecodeError):
                raise EvaluationFileError(f"{path} is no text ({error}); delete it or name another file.") from error
            raise

    def _take_in(self, lines: list[str], path: Path) -> None:
        head = _parse(lines[0])
        if (head.get("schema"), head.get("schema_version")) != (SCHEMA, SCHEMA_VERSION):
            raise EvaluationFileError(f"{path} is no unfinished evaluation of this version; delete it or name another.")
        protocol = head.get("protocol")
        self._require_same(path, protocol if isinstance(protocol, dict) else {}, head.get("weights"))
        for number, line in enumerate(lines[1:], start=2):
            episode = read_episode(_parse(line), f"{path}: the episode in line {number}")
            self.episodes[episode.task_id] = episode

    def _write(self, value: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value, allow_nan=False) + "\n")
        self._file.flush()

    def _require_same(self, path: Path, protocol: dict[str, Any], weights: Any) -> None:
        advice = "Name another file, or delete this one to evaluate again."
        if difference := protocol_difference(protocol, self._head["protocol"], ("there", "here")):
            raise EvaluationFileError(f"{path} holds an evaluation of another protocol: {difference}. {advice}")
        if weights != self._head["weights"]:
            raise EvaluationFileError(f"{path} holds an evaluation of another policy (other weights). {advice}")


def _lock(file: IO[str], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InfrastructureError(f"Another process is writing {path}; wait for it to end.") from error
    except OSError as error:
        raise InfrastructureError(f"{path} cannot be locked ({error}); name a file on another file system.") from error


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

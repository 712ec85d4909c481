"""Claims: who writes a run that is kept on a storage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trial_ray.errors import FolderInUseError, StorageError
from trial_ray.files import read_json, write_json
from trial_ray.runs.ownership import holder
from trial_ray.runs.storage import WRITERS, Storage

LEASE_S = 120.0
"""Seconds after which a claim that was not renewed counts for nothing, by the storage's clock."""
_LAST = f"{WRITERS}/last"
"""File with the name of the claim under which the run was written last."""


class Claim:
    """Says on a storage who writes a run. pyarrow has no conditional write, so each machine's claim is a file of its own.

    A writer writes its claim, then lists all: of two that begin at once, one at least finds the other. A claim that was not renewed
    for :data:`LEASE_S` counts for nothing: who takes the run over removes it, and its writer stops at its next renewal, a quarter
    of that time later at most.

    Args:
        storage: of the run.
        record: folder that keeps the claim's name, so that no command is kept out by one that was killed on this machine.
        command: the command line.
    """

    def __init__(self, storage: Storage, record: Path, command: Sequence[str]) -> None:
        self._storage, self._holder = storage, holder(command)
        file = record / "claim.json"
        if not file.exists():
            write_json(file, {"name": f"{WRITERS}/{uuid.uuid4().hex}"})
        self._name = str(read_json(file)["name"])
        self._renewed = 0.0
        self._dead: list[str] = []
        self.was_last = _LAST in storage.files(WRITERS) and self._text(_LAST) == self._name
        """Whether this machine was the last to write the run."""

    def take(self) -> None:
        """Claim the run; until :meth:`hold` nothing else is changed.

        Raises:
            FolderInUseError: another claim counts.
        """
        self._write()
        claims = self._storage.files(WRITERS)
        mine = claims.pop(self._name, None)
        claims.pop(_LAST, None)
        for name, info in claims.items():
            age = (mine.mtime_ns - info.mtime_ns) / 1e9 if mine else 0.0
            if age < LEASE_S:
                other = self._text(name)
                self.release()
                raise FolderInUseError(
                    f"{self._storage.uri} is in use by {other}, which wrote there {age:.0f} s ago. Wait until it has ended, or "
                    f"stop it; one that was killed counts no more after {LEASE_S:.0f} s. To read the run is possible meanwhile."
                )
        self._dead = list(claims)

    def hold(self) -> None:
        """Note that from now on this machine is the last to write the run, and remove the claims that count for nothing."""
        self._storage.write(_LAST, [self._name.encode()])
        for name in self._dead:
            self._storage.remove(name)

    def renew(self) -> None:
        """Renew the claim if that is due.

        Raises:
            StorageError: another command has taken the run over.
        """
        if time.monotonic() - self._renewed < LEASE_S / 4:
            return
        if self._name not in self._storage.files(WRITERS):
            raise StorageError("another command has taken the run over, which did not see this one for too long")
        self._write()

    def release(self) -> None:
        """Let others write the run."""
        self._storage.remove(self._name)

    def _write(self) -> None:
        self._storage.write(self._name, [self._holder.encode(errors="replace")])
        self._renewed = time.monotonic()

    def _text(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return b"".join(self._storage.read(name)).decode(errors="replace")
        return "another command"  # which has ended meanwhile

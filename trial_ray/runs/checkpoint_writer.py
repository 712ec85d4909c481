"""Checkpoints of a run, written while training goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.errors import CheckpointError
from trial_ray.files import partial_of
from trial_ray.runs.checkpoints import name_checkpoint, prune_checkpoints, remove_checkpoint, write_manifest

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPO

WRITE_TIMEOUT_S = 1800.0
"""How long the files of one checkpoint may take once nothing else is left to do."""
STOPPED = ".stopped"
"""Suffix of a checkpoint of a diverged policy, saved aside."""
_POLL_S = 0.05


@dataclass(slots=True)
class _Unfinished:
    partial: Path
    target: Path
    manifest: Future[None] | None = None


class CheckpointWriter:
    """Saves an algorithm as ``folder/<iteration>``; a folder appears under that name only once it is complete.

    At most one checkpoint is being written at a time.

    Args:
        algorithm: what is saved.
        folder: of the run's checkpoints.
        keep: how many of the newest are kept.
        on_saved: called with the iteration of each that is complete, those saved aside left out.
    """

    def __init__(
        self, algorithm: GRPO, folder: Path, keep: int, on_saved: Callable[[int], None] = lambda iteration: None
    ) -> None:
        self._algorithm = algorithm
        self._folder = folder.resolve()
        self._keep = keep
        self._on_saved = on_saved
        self._unfinished: _Unfinished | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manifest")
        for left in self._folder.glob(".*.partial"):  # by a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)

    def begin(self, iteration: int, mark: str = "") -> Path:
        """Save the present state; its large files may still be written when this returns.

        Args:
            iteration: after which the state is.
            mark: what the folder's name ends with.

        Returns:
            The folder's name once it is complete.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.finish()
        target = self._folder / f"{iteration:06d}{mark}"
        self._unfinished = _Unfinished(partial_of(target), target)
        try:
            self._unfinished.partial.mkdir(parents=True)
            self._algorithm.begin_saving(self._unfinished.partial)
        except BaseException:
            self.discard()
            raise
        return target

    def save(self, iteration: int, *, aside: bool = False) -> Path:
        """Save the present state and return once it is complete.

        Args:
            iteration: after which the state is.
            aside: under a name that no run continues from by itself, and without deleting any checkpoint.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        target = self.begin(iteration, STOPPED if aside else "")
        self.finish()
        return target

    def poll(self) -> None:
        """Give the unfinished checkpoint its name if all of it has been written.

        Raises:
            CheckpointError: it could not be written; it is removed.
        """
        unfinished = self._unfinished
        if unfinished is None:
            return
        try:
            if unfinished.manifest is None:
                if self._algorithm.saving_finished():
                    unfinished.manifest = self._thread.submit(write_manifest, unfinished.partial)
            elif unfinished.manifest.done():
                if error := unfinished.manifest.exception():
                    raise CheckpointError(f"{unfinished.target} could not be written: {error}") from error
                self._complete(unfinished)
                self._unfinished = None
        except BaseException:
            self.discard()
            raise

    def finish(self) -> None:
        """Wait until the unfinished checkpoint is complete.

        Raises:
            CheckpointError: it could not be written, or not within :data:`WRITE_TIMEOUT_S`; it is removed.
        """
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        self.poll()
        while self._unfinished is not None:
            if time.monotonic() > deadline:
                target = self._unfinished.target
                self.discard()
                raise CheckpointError(
                    f"{target} was not written within {WRITE_TIMEOUT_S:.0f} s. Check the file system of the run folder, then "
                    "resume the run."
                )
            time.sleep(_POLL_S)
            self.poll()

    def discard(self) -> None:
        """Remove what has been written of a checkpoint that is not complete."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished.partial, ignore_errors=True)
            self._unfinished = None

    def _complete(self, written: _Unfinished) -> None:
        if written.target.exists():
            remove_checkpoint(written.target)
        name_checkpoint(written.partial, written.target)
        if written.target.name.isdecimal():  # else it was saved aside
            self._on_saved(int(written.target.name))
            prune_checkpoints(self._folder, self._keep)

"""The viewer's folder: the page, its script and style, and the data of one or two runs."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trial_ray.errors import UserInputError
from trial_ray.reports.chunks import ChunkWriter, script
from trial_ray.reports.recorded import visible
from trial_ray.reports.records import RunRecord

MARK = "trial_ray_viewer.json"
"""What tells a viewer's folder, which may be replaced, from any other."""
ASSETS = ("data.js", "list.js", "reader.js", "viewer.js", "viewer.css")


@dataclass(frozen=True, slots=True)
class WrittenViewer:
    """What was written.

    Attributes:
        page: the file to open.
        trajectories: how many can be read on it.
        notes: what is missing, in sentences; the page shows them too.
    """

    page: Path
    trajectories: int
    notes: list[str]


def write_viewer(
    runs: Sequence[RunRecord], target: Path, notes: Sequence[str] = (), progress: Callable[[], None] = lambda: None
) -> WrittenViewer:
    """Write the viewer of some runs, in place of an older one at ``target``; it appears complete or not at all.

    Args:
        runs: what to show.
        target: the viewer's folder.
        notes: what is known to be missing.
        progress: called after every iteration.

    Raises:
        UserInputError: ``target`` holds something else than a viewer, or no iteration could be read.
    """
    if target.exists() and not (target / MARK).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UserInputError(f"{target} exists and is no viewer's folder. Name another one with --out.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        (partial / "data").mkdir(parents=True)
        written = _write(runs, partial, list(notes), progress)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return WrittenViewer(target / "index.html", written.count, written.notes)


@dataclass(slots=True)
class _Written:
    count: int
    notes: list[str]


def _write(runs: Sequence[RunRecord], folder: Path, notes: list[str], progress: Callable[[], None]) -> _Written:
    writer = ChunkWriter(folder / "data")
    for index, run in enumerate(runs):
        for iteration in run.recorded:
            try:
                recorded = run.read(iteration)
            except UserInputError as error:
                notes.append(f"{run.name}: iteration {iteration} is not shown. {error}")
                recorded = []
            for each in recorded:
                writer.add(index, each, run.tokens)
            progress()
    if not writer.count:
        raise UserInputError(" ".join(notes) or "There are no trajectories to show.")
    described = writer.close()
    if writer.untrained:
        share = (
            "No trajectory has"
            if writer.untrained == writer.count
            else (f"{writer.untrained:,} of {writer.count:,} trajectories do not have")
        )
        notes.append(
            f"{share} a record of training: turn multipliers, gaps, advantages and learner log-probabilities were not recorded, "
            "or the trajectories were not trained on."
        )
    described |= {"runs": [visible(run.name) for run in runs], "notes": [visible(note) for note in notes]}
    (folder / "data" / "about-0.js").write_text(script("about", 0, described), encoding="ascii")
    _write_page(folder)
    (folder / MARK).write_text(json.dumps({"schema_version": 1, "runs": [run.name for run in runs]}), encoding="utf-8")
    return _Written(writer.count, notes)


def _write_page(folder: Path) -> None:
    """The page with a fresh nonce, without which no script or style runs on it."""
    assets = resources.files("trial_ray.reports") / "assets/viewer"
    page = (assets / "index.html").read_text(encoding="utf-8").replace("NONCE", secrets.token_urlsafe(18))
    (folder / "index.html").write_text(page, encoding="utf-8")
    for name in ASSETS:
        (folder / name).write_text((assets / name).read_text(encoding="utf-8"), encoding="utf-8")


def _replace(partial: Path, target: Path) -> None:
    old = partial.with_suffix(".old")
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)

"""No text out of a recorded file, a folder, a data set or a server becomes a path: hostile names at every place that joins one."""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from synthetic_run import make_run

from trial_envs.errors import TrialEnvError
from trial_envs.webshop.catalogue import check_files
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.errors import TrialRayError
from trial_ray.evaluation.evaluation_sets import read_evaluation_set
from trial_ray.files import cache_root
from trial_ray.models.packaged import packaged_folder
from trial_ray.models.tiny import build_tokenizer
from trial_ray.reports.viewer import write_viewer
from trial_ray.runs.reader import open_run, read_runs
from trial_ray.runs.storage import Storage, download

NAMES = ("../../x", "..", "{0}/absolute/x", "a/b", "a\0b", "x" * 5000, "CON", "\u202e\u0130é", "", "-")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    return open_run(make_run(tmp_path_factory.mktemp("recorded") / "run", tokenizer, 8, iterations=1))


def named(run, name: str):
    """The run with a trajectory whose ids are all ``name``, and one whose are not."""
    first, second = run.read(1)[:2]
    hostile = dataclasses.replace(first.trajectory, task_id=name, environment=name, family=name)
    found = [dataclasses.replace(first, trajectory=hostile), second]
    return SimpleNamespace(recorded=[1], read=lambda iteration: found, name=name, tokens=None)


def viewed(folder: Path, name: str, run) -> None:
    assert write_viewer([named(run, name)], folder / "out").trajectories == 2


def swept(folder: Path, name: str, run) -> None:
    """A run beside the sweep must not be read as one of its trials."""
    for beside in (folder.parent / "x", folder.parent.parent / "x", folder.parents[2] / "absolute/x"):
        beside.mkdir(parents=True, exist_ok=True)
        (beside / "run.json").write_text('{"schema": "trial_ray/run", "schema_version": 1, "state": "stolen"}')
    (folder / "sweep.json").write_text(json.dumps({"trials": [{"name": name}]}))
    (found,) = read_runs(folder)
    assert found.path.parent == folder
    assert found.state != "stolen"


def listed(folder: Path, name: str, run) -> None:
    """Of a storage whose server says that it holds such a file."""
    info = SimpleNamespace(path=f"bucket/run/{name}", is_file=True, size=1, mtime_ns=1)
    filesystem = SimpleNamespace(get_file_info=lambda selector: [info])
    storage = Storage("mock://bucket/run", filesystem, "bucket/run")
    with storage.answering(), patch.object(Storage, "fetch", lambda storage, name, target: target.write_bytes(b"1")):
        download(storage, folder / "copy", storage.files())


def stored(folder: Path, name: str, run) -> None:
    cached = Storage.open(f"file:///{name}").cached("copies")
    assert Path(os.path.normpath(cached)).is_relative_to(cache_root() / "storage/copies")


def catalogued(folder: Path, name: str, run) -> None:
    check_files(folder, {"files": {name: {"bytes": 1, "sha256": ""}}}, digests=False)


PLACES = {
    "viewer": viewed,
    "table of a sweep": swept,
    "listing of a storage": listed,
    "cache of a storage": stored,
    "manifest of a shop": catalogued,
    "evaluation set": lambda folder, name, run: read_evaluation_set(name),
    "packaged model": lambda folder, name, run: packaged_folder(f"package:{name}"),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_a_hostile_name_is_refused_or_stays_inside(place, run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache/inside"))
    for number, name in enumerate(NAMES):
        folder = tmp_path / f"{number}/a/inside"
        folder.mkdir(parents=True)
        with suppress(TrialRayError, TrialEnvError):
            PLACES[place](folder, name.format(folder.parents[2]), run)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "run.json"]
    assert [path for path in written if "inside" not in path.parts] == []

"""A run at a URI is copied there after each checkpoint, in an order from which it can be continued."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from failing_storage import failing_storage

from trial_ray.errors import StorageError, UserInputError
from trial_ray.files import CACHE_VARIABLE
from trial_ray.runs import stored_run as module
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, list_checkpoints, prune_checkpoints
from trial_ray.runs.storage import whole_checkpoints
from trial_ray.runs.stored_run import local_folder, stored_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    """URI of a storage."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return f"file://{tmp_path}/bucket/my%20runs/one"


@pytest.fixture
def there(tmp_path) -> Path:
    """Where the storage keeps the run."""
    return tmp_path / "bucket" / "my runs" / "one"


@pytest.fixture
def printed():
    return []


@pytest.fixture
def storing(place, printed):
    def enter(resume=False):
        return stored_run(place, resume=resume, command=["trial-ray", "train"], print_line=printed.append)

    return enter


def write_iteration(folder: Path, iteration: int) -> None:
    """Write what a session writes: recordings, metrics, a checkpoint that appears whole, and its iteration in ``run.json``."""
    recorded = folder / "trajectories" / f"iteration={iteration:05d}"
    recorded.mkdir(parents=True)
    (recorded / "runner 1.parquet").write_text(f"turns of {iteration}")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": iteration}) + "\n")
    partial = folder / "checkpoints" / f".{iteration:06d}.abc.partial"
    (partial / "learner").mkdir(parents=True)
    (partial / "learner" / ".metadata").write_text(f"weights of {iteration}")
    (partial / CHECKPOINT_MARK).write_text("{}")
    (partial / "manifest.json").write_text(f"{iteration}")
    partial.rename(folder / "checkpoints" / f"{iteration:06d}")
    (folder / "run.json").write_text(json.dumps({"schema": "trial_ray/run", "iteration": iteration}))


def contents(folder: Path) -> dict[str, str]:
    """Return the texts of the files that belong on a storage."""
    texts = {}
    for path, _, names in os.walk(folder):
        for file in (Path(path, name) for name in names if name != ".lock"):
            with suppress(FileNotFoundError):
                texts[file.relative_to(folder).as_posix()] = file.read_text()
    return texts


def test_files_are_stored_in_an_order_that_can_be_continued_from(monkeypatch, place, there, storing, printed):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with storing() as store:
        for iteration in (1, 2, 3):
            write_iteration(folder, iteration)
            prune_checkpoints(folder / "checkpoints", 1)
            store()
            assert contents(there) == contents(folder)
        (folder / "summary.json").write_text("written at the end")
    assert contents(there) == contents(folder)
    assert [path.name for path in (there / "checkpoints").iterdir()] == ["000003"]
    for iteration in (1, 2, 3):
        checkpoint = f"checkpoints/{iteration:06d}"
        order = [
            storage.done.index(f"+{name}")
            for name in (
                f"trajectories/iteration={iteration:05d}/runner 1.parquet",
                f"{checkpoint}/learner/.metadata",
                f"{checkpoint}/{CHECKPOINT_MARK}",
            )
        ]
        assert order == sorted(order)
        assert storage.done.index(f"+{checkpoint}/manifest.json") < order[-1]
        if iteration < 3:
            following = f"checkpoints/{iteration + 1:06d}/{CHECKPOINT_MARK}"
            removed = storage.done.index(f"-{checkpoint}/{CHECKPOINT_MARK}")
            assert storage.done.index(f"+{following}") < removed < storage.done.index(f"-{checkpoint}/manifest.json")
    assert printed[-1] == f"stored in {place}"


def test_a_change_is_copied_even_if_the_storages_clock_is_ahead(place, there, storing):
    with storing() as store:
        folder = local_folder(place)
        folder.mkdir(parents=True)
        write_iteration(folder, 1)
        (folder / "summary.json").write_text("1")
        store()
        os.utime(there / "summary.json", (2**32, 2**32))
        (folder / "summary.json").write_text("2")
        os.utime(folder / "summary.json", (2**31, 2**31))  # two writes may have the same time
        store()
        assert (there / "summary.json").read_text() == "2"


def test_an_incomplete_copy_leaves_the_last_checkpoint(monkeypatch, place, there, storing, printed):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with storing() as store:
        write_iteration(folder, 1)
        store()
        write_iteration(folder, 2)
        prune_checkpoints(folder / "checkpoints", 1)
        storage.fails = lambda path: path.endswith("000002/manifest.json")
        store()
        assert whole_checkpoints(contents(there)) == ["000001"]
        assert "turns of 2" in contents(there).values()
        assert "warning" in printed[0]
        storage.fails = lambda path: False
        store()
        assert contents(there) == contents(folder)


def test_a_run_without_its_storage_can_be_resumed_here(monkeypatch, place, there, storing):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with pytest.raises(StorageError) as raised, storing():  # noqa: PT012
        storage.broken = True
        write_iteration(folder, 1)
    assert all(word in str(raised.value) for word in (place, str(folder), "the storage is broken"))
    whole = contents(folder)
    storage.broken = False
    with storing(resume=True):
        assert contents(folder) == whole
        write_iteration(folder, 2)
    assert contents(there) == contents(folder)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_two_machines_continue_the_run_in_turn(tmp_path, monkeypatch, place, there, storing, printed):
    with storing():
        write_iteration(local_folder(place), 1)
    first = local_folder(place)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with storing(resume=True):
        second = local_folder(place)
        assert second != first
        assert contents(second) == contents(first)
        write_iteration(second, 2)
        shutil.rmtree(second / "checkpoints" / "000001")
    assert contents(there) == contents(second)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with storing(resume=True):
        assert contents(first) == contents(second)
    (aside,) = first.parent.glob("one.replaced-*")
    assert str(aside) in printed[-2]


def test_an_incomplete_checkpoint_is_not_continued_from(tmp_path, monkeypatch, place, there, storing):
    with storing():
        write_iteration(local_folder(place), 1)
        write_iteration(local_folder(place), 2)
    (there / "checkpoints" / "000002" / CHECKPOINT_MARK).unlink()  # the last of its files that is written
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with storing(resume=True) as store:
        folder = local_folder(place)
        assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["000001"]
        store()
        assert not (there / "checkpoints" / "000002").exists()


def test_an_interrupted_download_is_repeated(tmp_path, monkeypatch, place, there, storing):
    with storing():
        write_iteration(local_folder(place), 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    whole = contents(there)

    def cut(storage, folder, files):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "download", cut)
        with pytest.raises(KeyboardInterrupt), storing(resume=True):
            pass
    assert contents(there) == whole
    with storing(resume=True):
        assert contents(local_folder(place)) == whole
    assert contents(there) == whole


def test_a_new_run_overwrites_no_other(tmp_path, monkeypatch, place, there, storing):
    with storing():
        write_iteration(local_folder(place), 1)
    before = contents(there)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(UserInputError, match="--resume"), storing():
        pass
    assert contents(there) == before
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (local_folder(place) / "more").write_text("not copied yet")
    with storing(resume=True):  # the refused command has not replaced the local folder
        assert (local_folder(place) / "more").exists()
    shutil.rmtree(there)
    with pytest.raises(UserInputError, match="--resume"), storing():
        pass
    assert contents(there) == {}
    with storing(resume=True):
        pass
    assert contents(there) == contents(local_folder(place))

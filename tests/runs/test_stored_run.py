"""A run at a URI is copied there after each checkpoint, in an order from which it can be continued."""

import json
import os
import shutil
from functools import partial

import pytest
from cli_fakes import names
from failing_storage import failing_storage

from trial_ray.errors import StorageError, UserInputError
from trial_ray.files import CACHE_VARIABLE, write_text
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, list_checkpoints, prune_checkpoints
from trial_ray.runs.storage import whole_checkpoints
from trial_ray.runs.stored_run import local_folder, stored_run


@pytest.fixture
def there(tmp_path):
    """Return the folder in which the storage keeps the run."""
    return tmp_path / "bucket/my runs/one"


@pytest.fixture
def place(there):
    """Return the URI of the storage."""
    return there.as_uri()


@pytest.fixture
def machine(tmp_path, monkeypatch, place):
    """Return a function that switches to another machine, and returns its folder of the run."""

    def switch(name):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / name))
        return local_folder(place)

    return switch


@pytest.fixture
def folder(machine):
    """Return the run's folder on the first machine."""
    return machine("first")


@pytest.fixture
def printed():
    return []


@pytest.fixture
def storing(place, folder, printed):
    return partial(stored_run, place, resume=False, command=["trial-ray", "train"], print_line=printed.append)


def write_iteration(folder, iteration):
    """Write what a session writes: recordings, metrics, a checkpoint, and its iteration in ``run.json``."""
    checkpoint = f"checkpoints/{iteration:06d}"
    written = {
        f"trajectories/iteration={iteration:05d}/runner 1.parquet": f"turns of {iteration}",
        f"{checkpoint}/learner/.metadata": f"weights of {iteration}",
        f"{checkpoint}/{CHECKPOINT_MARK}": "{}",
        f"{checkpoint}/manifest.json": f"{iteration}",
        "run.json": json.dumps({"schema": "trial_ray/run", "iteration": iteration}),
    }
    for name, text in written.items():
        write_text(folder / name, text)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": iteration}) + "\n")


def contents(folder):
    """Return the texts of the files that belong on a storage."""
    return {
        file.relative_to(folder).as_posix(): file.read_text()
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


def test_files_are_stored_in_an_order_that_can_be_continued_from(monkeypatch, folder, there, storing):
    storage = failing_storage(monkeypatch, there)
    with storing() as store:
        for iteration in (1, 2, 3):
            write_iteration(folder, iteration)
            prune_checkpoints(folder / "checkpoints", 1)
            store()
            assert contents(there) == contents(folder)
        (folder / "summary.json").write_text("written at the end")
    assert contents(there) == contents(folder)
    assert names(there / "checkpoints") == ["000003"]

    def ordered(*names):
        positions = [storage.done.index(name) for name in names]
        return positions == sorted(positions)

    first, second = (f"checkpoints/{iteration:06d}" for iteration in (1, 2))
    recorded = "trajectories/iteration=00001/runner 1.parquet"
    assert ordered(f"+{recorded}", f"+{first}/learner/.metadata", f"+{first}/{CHECKPOINT_MARK}")
    assert ordered(f"+{first}/manifest.json", f"+{first}/{CHECKPOINT_MARK}")
    assert ordered(f"+{second}/{CHECKPOINT_MARK}", f"-{first}/{CHECKPOINT_MARK}", f"-{first}/manifest.json")


def test_a_change_is_copied_even_if_the_storages_clock_is_ahead(folder, there, storing):
    with storing() as store:
        write_iteration(folder, 1)
        (folder / "summary.json").write_text("1")
        store()
        os.utime(there / "summary.json", (2**32, 2**32))
        (folder / "summary.json").write_text("2")
        os.utime(folder / "summary.json", (2**31, 2**31))  # two writes may have the same time
        store()
        assert (there / "summary.json").read_text() == "2"


def test_an_incomplete_copy_leaves_the_last_checkpoint(monkeypatch, folder, there, storing, printed):
    storage = failing_storage(monkeypatch, there)
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


def test_a_run_without_its_storage_can_be_resumed_here(monkeypatch, place, folder, there, storing):
    storage = failing_storage(monkeypatch, there)
    with pytest.raises(StorageError) as raised, storing():  # noqa: PT012
        storage.broken = True
        write_iteration(folder, 1)
    assert place in str(raised.value)
    whole = contents(folder)
    storage.broken = False
    with storing(resume=True):
        assert contents(folder) == whole
    assert contents(there) == whole


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_an_incomplete_checkpoint_is_not_continued_from(machine, folder, there, storing):
    with storing():
        write_iteration(folder, 1)
        write_iteration(folder, 2)
    (there / "checkpoints/000002" / CHECKPOINT_MARK).unlink()  # the mark is written last
    second = machine("second")
    with storing(resume=True) as store:
        assert list_checkpoints(second / "checkpoints") == [second / "checkpoints/000001"]
        store()
        assert not (there / "checkpoints/000002").exists()


def test_a_new_run_overwrites_no_other(machine, folder, there, storing):
    with storing():
        write_iteration(folder, 1)
    before = contents(there)
    machine("second")
    with pytest.raises(UserInputError, match="--resume"), storing():
        pass
    assert contents(there) == before
    machine("first")
    (folder / "more").write_text("not copied yet")
    with storing(resume=True):  # The refused command has not replaced the local folder.
        assert (folder / "more").exists()
    shutil.rmtree(there)
    with pytest.raises(UserInputError, match="--resume"), storing():
        pass
    assert not contents(there)
    with storing(resume=True):
        pass
    assert contents(there) == contents(folder)

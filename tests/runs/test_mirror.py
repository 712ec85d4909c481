"""A run's folder is mirrored to a storage: in an order that can be continued from, through failures, by one command at a time."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from failing_storage import failing_storage

from trial_ray.errors import CheckpointError, FolderInUseError, StorageError, UserInputError
from trial_ray.files import CACHE_VARIABLE
from trial_ray.runs import claims
from trial_ray.runs import mirror as module
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, list_checkpoints, prune_checkpoints
from trial_ray.runs.mirror import local_folder, mirrored
from trial_ray.runs.storage import whole_checkpoints

WAIT_S = 60.0


@pytest.fixture
def place(tmp_path, monkeypatch):
    """URI of a storage, on which runs of this test are looked at every few milliseconds."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(module, "PAUSE_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.05)
    return f"file://{tmp_path}/bucket/my%20runs/one"


@pytest.fixture
def there(tmp_path) -> Path:
    """Where the storage keeps the run."""
    return tmp_path / "bucket" / "my runs" / "one"


@pytest.fixture
def told():
    return []


@pytest.fixture
def mirroring(place, told):
    def enter(resume=False, tell=None):
        return mirrored(place, resume=resume, command=["trial-ray", "train"], tell=tell or told.append)

    return enter


def write_iteration(folder: Path, iteration: int, *, checkpoint: bool = True) -> None:
    """As a session does: recordings, metrics, then a checkpoint that appears whole, then its note."""
    recorded = folder / "trajectories" / f"iteration={iteration:05d}"
    recorded.mkdir(parents=True)
    (recorded / "runner 1.parquet").write_text(f"turns of {iteration}")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": iteration}) + "\n")
    if checkpoint:
        partial = folder / "checkpoints" / f".{iteration:06d}.abc.partial"
        (partial / "learner").mkdir(parents=True)
        (partial / "learner" / ".metadata").write_text(f"weights of {iteration}")
        (partial / CHECKPOINT_MARK).write_text("{}")
        (partial / "manifest.json").write_text(f"{iteration}")
        partial.rename(folder / "checkpoints" / f"{iteration:06d}")
    (folder / "run.json").write_text(json.dumps({"schema": "trial_ray/run", "iteration": iteration}))


def contents(folder: Path) -> dict[str, str]:
    """Of every file that belongs on a storage, which may be changing."""
    found = {}
    for path, _, names in os.walk(folder):
        for file in (Path(path, name) for name in names if name != ".lock" and not path.endswith(".writers")):
            with suppress(FileNotFoundError):
                found[file.relative_to(folder).as_posix()] = file.read_text()
    return found


def until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_storage_follows_and_nothing_comes_before_what_it_relies_on(monkeypatch, place, there, mirroring, told):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with mirroring():
        for iteration in (1, 2, 3):
            write_iteration(folder, iteration)
            prune_checkpoints(folder / "checkpoints", 1)
            until(lambda: contents(there) == contents(folder))
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
            assert storage.done.index(f"-{checkpoint}/{CHECKPOINT_MARK}") < storage.done.index(f"-{checkpoint}")
            assert storage.done.count(f"+{checkpoint}/{CHECKPOINT_MARK}") == 1
    notes = [index for index, each in enumerate(storage.done) if each == "+run.json"]
    marks = [
        index for index, each in enumerate(storage.done) if each.endswith(f"/{CHECKPOINT_MARK}") and each[0] == "+"
    ]
    assert notes[0] < marks[0]
    assert marks[-1] < notes[-1]
    assert told[-1].startswith(f"mirrored to {place}: ")


def test_a_checkpoint_is_none_while_its_files_change(monkeypatch, place, there, mirroring):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    mark = f"checkpoints/000001/{CHECKPOINT_MARK}"
    with mirroring():
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        storage.done.clear()
        (folder / "checkpoints/000001/manifest.json").write_text("another")
        until(lambda: contents(there) == contents(folder))
    changes = [each for each in storage.done if "000001" in each]
    assert changes == [f"-{mark}", "+checkpoints/000001/manifest.json", f"+{mark}"]


def test_checkpoints_that_are_removed_before_they_are_copied_leave_the_last_one_there(
    monkeypatch, place, there, mirroring
):
    storage, whole = failing_storage(monkeypatch, there), []
    folder = local_folder(place)

    def overtake(path):
        whole.append(whole_checkpoints(contents(there)))
        if path.endswith("000002/learner/.metadata"):
            shutil.rmtree(folder / "checkpoints" / "000002")
        return False

    with mirroring():
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        storage.fails = overtake
        partial = (folder / "checkpoints" / "000001").rename(folder / "checkpoints" / ".000001.abc.partial")
        write_iteration(folder, 2)
        until(lambda: whole and not (folder / "checkpoints" / "000002").exists())
        until(lambda: json.loads(contents(there)["run.json"] or "{}").get("iteration") == 2)
        shutil.rmtree(partial)
        write_iteration(folder, 3)
        until(lambda: contents(there) == contents(folder))
    assert all(whole)
    assert whole_checkpoints(contents(there)) == ["000003"]


def test_a_run_goes_on_while_the_storage_fails_and_it_catches_up(monkeypatch, place, there, mirroring, told):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with mirroring():
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        storage.broken = True
        write_iteration(folder, 2)
        until(lambda: told)
        write_iteration(folder, 3)
        assert "turns of 2" not in contents(there).values()
        storage.broken = False
        until(lambda: len(told) > 1)
    assert len(told) == 3
    assert f"warning: {place} cannot be written: the storage is broken. It lacks " in told[0]
    assert str(folder) in told[0]
    assert f"{place} is up to date again" in told[1]
    assert contents(there) == contents(folder)


def test_a_run_whose_storage_stays_away_says_where_everything_is_and_can_be_resumed(
    monkeypatch, place, there, mirroring
):
    monkeypatch.setattr(module, "FINISH_S", 0.3)
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with pytest.raises(StorageError) as raised, mirroring():  # noqa: PT012
        storage.broken = True
        write_iteration(folder, 1)
    assert all(word in str(raised.value) for word in (place, str(folder), "the storage is broken", "6 files"))
    whole = contents(folder)
    storage.broken = False
    until(lambda: not [each for each in threading.enumerate() if each.name == "mirror"])
    with mirroring(resume=True):
        assert contents(folder) == whole
        write_iteration(folder, 2)
    assert contents(there) == contents(folder)


def test_the_failure_of_a_run_stays_the_error_where_the_storage_fails_too(monkeypatch, place, there, mirroring):
    monkeypatch.setattr(module, "FINISH_S", 0.3)
    storage = failing_storage(monkeypatch, there)
    with pytest.raises(ZeroDivisionError) as raised, mirroring():  # noqa: PT012
        write_iteration(local_folder(place), 1)
        storage.broken = True
        raise ZeroDivisionError
    assert "is not up to date" in raised.value.__notes__[0]


def test_a_run_that_could_not_begin_leaves_nothing(place, there, mirroring):
    folder = local_folder(place)
    with pytest.raises(UserInputError), mirroring():  # noqa: PT012
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        shutil.rmtree(folder)  # as a session does after a user's error
        raise UserInputError("such a setting does not exist")
    assert contents(there) == {}
    with mirroring():
        write_iteration(folder, 1)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_another_machine_continues_the_run_and_the_first_one_takes_that_over(
    tmp_path, monkeypatch, place, there, mirroring, told
):
    with mirroring():
        write_iteration(local_folder(place), 1)
    first = local_folder(place)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with mirroring(resume=True):
        second = local_folder(place)
        assert second != first
        assert contents(second) == contents(first)
        write_iteration(second, 2)
        shutil.rmtree(second / "checkpoints" / "000001")
    assert contents(there) == contents(second)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with mirroring(resume=True):
        assert contents(first) == contents(second)
    (aside,) = first.parent.glob("one.replaced-*")
    assert str(aside) in told[-2]


def test_a_checkpoint_that_was_cut_is_not_continued_from(tmp_path, monkeypatch, place, there, mirroring):
    with mirroring():
        write_iteration(local_folder(place), 1)
        write_iteration(local_folder(place), 2)
    (there / "checkpoints" / "000002" / CHECKPOINT_MARK).unlink()  # the last of its files that is written
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with mirroring(resume=True):
        folder = local_folder(place)
        assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["000001"]
        assert not (folder / "checkpoints" / "000002").exists()
        until(lambda: not (there / "checkpoints" / "000002").exists())


def test_what_a_killed_command_did_not_copy_follows_when_it_resumes(monkeypatch, place, there, mirroring):
    storage = failing_storage(monkeypatch, there)
    folder = local_folder(place)
    with mirroring():
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        storage.fails = lambda path: path.endswith("manifest.json")
        write_iteration(folder, 2)
        until(lambda: "turns of 2" in contents(there).values())
        claim, known = ((folder.parent / ".one.mirror" / name).read_bytes() for name in ("claim.json", "files.json"))
        half, whole = contents(there), contents(folder)
        claims = {path: path.read_bytes() for path in (there / ".writers").iterdir()}
        storage.fails = lambda path: False
    # As it was in the middle: a claim that was not given back, half a checkpoint, an old note.
    shutil.rmtree(there)
    for name, text in half.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(text)
    for path, content in claims.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (folder.parent / ".one.mirror" / "claim.json").write_bytes(claim)
    (folder.parent / ".one.mirror" / "files.json").write_bytes(known)
    (there / "metrics.jsonl").write_text("{")  # which a kill has cut
    with mirroring(resume=True):
        assert contents(folder) == whole
    assert contents(there) == whole


def test_a_copy_that_was_cut_is_made_again_and_removes_nothing(tmp_path, monkeypatch, place, there, mirroring):
    with mirroring():
        write_iteration(local_folder(place), 1)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    whole = contents(there)

    def cut(storage, folder, files):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "download", cut)
        with pytest.raises(KeyboardInterrupt), mirroring(resume=True):
            pass
    assert contents(there) == whole
    with mirroring(resume=True):
        assert contents(local_folder(place)) == whole
    assert contents(there) == whole


# -- one writer --------------------------------------------------------------------------------------------------------


def test_a_second_command_is_refused_wherever_it_runs_and_changes_nothing(
    tmp_path, monkeypatch, place, there, mirroring
):
    folder = local_folder(place)
    with mirroring():
        write_iteration(folder, 1)
        until(lambda: contents(there) == contents(folder))
        before = contents(there)
        for cache in ("cache", "elsewhere"):
            monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / cache))
            for resume in (True, False):
                with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()} on"), mirroring(resume):
                    pass
        assert contents(there) == before
        assert len(list((there / ".writers").iterdir())) == 2  # the claim, and whose was the last
        write_iteration(folder, 2)
    assert contents(there) == contents(folder)


def test_of_many_that_begin_at_once_one_at_most_writes(tmp_path, monkeypatch, place, mirroring):
    writing, most, refused, expected = [0], [0], [], [0]
    caches = {}
    monkeypatch.setattr("trial_ray.runs.storage.cache_root", lambda: caches[threading.current_thread().name])

    def begin():
        try:
            with mirroring():
                writing[0] += 1
                most[0] = max(most[0], writing[0])
                until(lambda: len(refused) >= expected[0])
                writing[0] -= 1
        except Exception as error:
            refused.append(error)

    for _ in range(5):
        expected[0] = len(refused) + 5  # the one that writes does so until the others have found that out
        threads = [threading.Thread(target=begin, name=f"writer {index}") for index in range(6)]
        caches.update({each.name: tmp_path / each.name for each in threads})
        for each in threads:
            each.start()
        for each in threads:
            each.join(WAIT_S)
    assert most[0] == 1
    assert {type(error) for error in refused} == {FolderInUseError}


def test_a_run_whose_writer_was_lost_is_taken_over_and_that_writer_stops(
    tmp_path, monkeypatch, place, there, mirroring, told
):
    folder = local_folder(place)
    lost, later = [], []

    def write():
        try:
            with mirroring(tell=later.append):
                write_iteration(folder, 1)
                until(lambda: contents(there) == contents(folder))
                lost.append(True)
                until(lambda: len(lost) > 1)
        except StorageError as error:
            later.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    until(lambda: lost)
    for claim in (there / ".writers").iterdir():  # not renewed for long
        os.utime(claim, (0, 0))
    monkeypatch.setattr("trial_ray.runs.storage.cache_root", lambda: tmp_path / "elsewhere")
    with mirroring(resume=True):
        taken = local_folder(place)
        monkeypatch.setattr(claims, "LEASE_S", 0.0)  # the first one looks at its claim now
        until(lambda: later)
        monkeypatch.setattr(claims, "LEASE_S", 120.0)
        write_iteration(folder, 2)
        write_iteration(taken, 3)
        lost.append(True)
        writer.join(WAIT_S)
    assert "is not written any more: another command has taken the run over" in later[0]
    assert isinstance(later[1], StorageError)
    assert str(folder) in str(later[1])
    assert contents(there) == contents(taken)


def test_a_new_run_does_not_write_over_another(tmp_path, monkeypatch, place, there, mirroring):
    with mirroring():
        write_iteration(local_folder(place), 1)
    before = contents(there)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(UserInputError, match=r"is not empty, it holds .*--resume"), mirroring():
        pass
    assert contents(there) == before
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (local_folder(place) / "more").write_text("not copied yet")
    with mirroring(resume=True):  # the refused command has not made the first one's folder an old copy
        assert (local_folder(place) / "more").exists()


def test_a_new_run_does_not_bring_an_older_ones_folder_there(place, there, mirroring):
    with mirroring():
        write_iteration(local_folder(place), 1)
    shutil.rmtree(there)  # by the user
    with pytest.raises(UserInputError, match=r"is not empty.*--resume"), mirroring():
        pass
    assert contents(there) == {}
    with mirroring(resume=True):
        pass
    assert contents(there) == contents(local_folder(place))


def test_where_no_run_is_none_is_resumed(place, there, mirroring):
    with pytest.raises(CheckpointError, match="is not a run folder"), mirroring(resume=True):
        pass
    assert not there.exists() or contents(there) == {}

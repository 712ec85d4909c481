"""Damaged checkpoints are skipped, and checkpoints of other users are not unpickled."""

import pickle
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from rejections import rejected

from trial_ray import trust
from trial_ray.errors import UserInputError
from trial_ray.files import read_json, write_json, write_text
from trial_ray.runs.checkpoints import (
    CHECKPOINT_MARK,
    MANIFEST,
    MODEL_INSIDE_CHECKPOINT,
    export_model,
    find_model,
    list_checkpoints,
    newest_whole_checkpoint,
    prune_checkpoints,
    require_own,
    require_whole,
    write_manifest,
)
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import read_runs
from trial_ray.sweeps.run import DEFINITION, Sweep

WEIGHTS = f"{MODEL_INSIDE_CHECKPOINT}/model.safetensors"
FILES = (CHECKPOINT_MARK, "algorithm_state.pkl", f"{MODEL_INSIDE_CHECKPOINT}/config.json", WEIGHTS)


@pytest.mark.parametrize("read", [find_model, read_runs, RunFolder.reopen])
def test_the_error_for_a_missing_folder_names_the_nearest(read, tmp_path):
    trial = "GRPO_trial_1af7c_00000_0_lr=0.1"
    for name in ("my-run", trial, ".1af7c_00000.partial"):
        (tmp_path / name).mkdir()
    for name, meant in (("my-rum", "my-run"), ("1af7c_00000", trial)):
        with pytest.raises(UserInputError, match=rf"Did you mean {tmp_path / meant}\?"):
            read(tmp_path / name)


class Program:
    """Create a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def key_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoints(tmp_path, key_folder):
    folder = tmp_path / "run/checkpoints"
    for name in ("000001", "000002", "000003"):
        for file in FILES:
            write_text(folder / name / file, "content")
        write_manifest(folder / name)
    return folder


@pytest.fixture
def checkpoint(checkpoints):
    """Return the newest checkpoint."""
    return checkpoints / "000003"


@pytest.mark.parametrize(
    ("name", "damaged"), [("algorithm_state.pkl", "con"), (MANIFEST, "{"), (WEIGHTS, "kontent"), (WEIGHTS, None)]
)
def test_a_damaged_checkpoint_is_skipped(checkpoints, checkpoint, name, damaged):
    (checkpoint / name).unlink() if damaged is None else (checkpoint / name).write_text(damaged)
    rejected("000003 is damaged", require_whole, checkpoint)
    whole, damages = newest_whole_checkpoint(checkpoints)
    assert whole == checkpoints / "000002"
    assert name in damages[0]
    # The damaged checkpoint is renamed, not deleted.
    assert list_checkpoints(checkpoints) == [checkpoints / "000001", checkpoints / "000002"]
    assert len(list(checkpoints.glob("000003.damaged-*"))) == 1


def test_a_model_is_exported_unless_its_own_files_are_damaged(checkpoints, checkpoint, tmp_path):
    (checkpoint / "algorithm_state.pkl").write_text("con")
    assert (export_model(checkpoint, tmp_path / "model") / "model.safetensors").read_text() == "content"
    (checkpoint / WEIGHTS).write_text("kontent")
    (checkpoints / "000002" / MODEL_INSIDE_CHECKPOINT / "notes.txt").symlink_to(tmp_path / "private")
    for iteration, reason in (("000003", "other content"), ("000002", "is a link")):
        rejected(reason, export_model, checkpoints / iteration, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_partly_removed_checkpoint_does_not_count(checkpoints, monkeypatch):
    def cut_off(path, **_):
        (path / MANIFEST).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("trial_ray.runs.checkpoints.shutil.rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(checkpoints, keep=1)
    assert list_checkpoints(checkpoints) == [checkpoints / "000002", checkpoints / "000003"]


# -- trust --------------------------------------------------------------------------------------------------------------


def test_copied_and_merged_checkpoints_of_this_user_are_trusted(checkpoint, tmp_path):
    require_own(checkpoint)
    require_own(shutil.copytree(checkpoint, tmp_path / "copy"))
    (checkpoint / MODEL_INSIDE_CHECKPOINT / "tokenizer.json").write_text("{}")
    require_own(checkpoint)


def test_only_this_user_can_read_the_key(checkpoint, key_folder):
    key = key_folder / trust.KEY_FILE
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o644)
    rejected("not signed", require_own, checkpoint)


def resign(checkpoint, signature):
    write_json(checkpoint / MANIFEST, read_json(checkpoint / MANIFEST) | {"signature": signature})


def replace_program(checkpoint):
    """Change a file and its entry in the manifest, as a user without the key can."""
    signature = read_json(checkpoint / MANIFEST)["signature"]
    (checkpoint / "algorithm_state.pkl").write_text("program")
    write_manifest(checkpoint)
    resign(checkpoint, signature)


@pytest.mark.parametrize(
    "change",
    [
        replace_program,
        lambda checkpoint: (checkpoint / MANIFEST).unlink(),
        # RLlib prefers this file to a pickle.
        lambda checkpoint: (checkpoint / "state.msgpack").touch(),
        lambda checkpoint: (checkpoint / "optimizer").symlink_to("/"),
        lambda checkpoint: resign(checkpoint, ["\ud800"]),
    ],
)
def test_changes_by_another_user_are_refused(checkpoint, change):
    change(checkpoint)
    require_whole(checkpoint)
    rejected("--trust", require_own, checkpoint)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "", "a\0b"])
def test_a_manifest_names_only_files_inside(checkpoint, name):
    write_json(checkpoint / MANIFEST, {"files": {name: {"bytes": 1, "sha256": "0"}}})
    rejected("not a file inside it", require_whole, checkpoint)


def test_without_a_stored_key_only_this_process_trusts_its_checkpoints(checkpoint, monkeypatch, caplog):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(checkpoint / CHECKPOINT_MARK))  # a file
    write_manifest(checkpoint)
    require_own(checkpoint)
    assert "--trust" in caplog.text
    trust._key_of_this_process.cache_clear()  # another process has another key
    rejected("not signed", require_own, checkpoint)


def test_a_sweep_continues_only_in_its_own_folder(key_folder, tmp_path):
    folder = tmp_path / "sweep"
    write_text(folder / DEFINITION, '{"description": {}, "iterations": null, "overrides": [], "method": null}')
    trust.sign_folder(folder)
    # Tune looks for these files, and would unpickle them.
    for name in ("tuner.pkl", "trainable.pkl", "experiment_state-1.json"):
        (folder / name).write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    plan = SimpleNamespace(description={})
    Sweep(plan, folder).require_folder(resume=True)
    copy = shutil.copytree(folder, tmp_path / "copy")
    for mark in ((copy / trust.MARK).read_bytes(), b"[]", b"\xff", None):
        (copy / trust.MARK).write_bytes(mark) if mark else (copy / trust.MARK).unlink()
        rejected("did not start it", Sweep(plan, copy).require_folder, resume=True)
    Sweep(plan, copy).require_folder(resume=True, trust=True)
    assert not (tmp_path / "ran").exists()

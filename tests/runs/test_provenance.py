"""Pickles are loaded out of a folder only where this user wrote it on this machine, or says --trust."""

from __future__ import annotations

import json
import pickle
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm

from trial_ray import cli
from trial_ray.errors import CheckpointError
from trial_ray.runs import provenance
from trial_ray.runs.checkpoints import (
    CHECKPOINT_MARK,
    MANIFEST,
    MODEL_INSIDE_CHECKPOINT,
    export_model,
    list_checkpoints,
    newest_whole_checkpoint,
    require_own,
    require_whole,
    write_manifest,
)
from trial_ray.sweeps.tuner import Sweep


class Program:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def key_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path, key_folder):
    path = tmp_path / "run" / "checkpoints" / "000001"
    model = path / MODEL_INSIDE_CHECKPOINT
    model.mkdir(parents=True)
    (path / CHECKPOINT_MARK).write_text("{}")
    (path / "algorithm_state.pkl").write_bytes(pickle.dumps({}))
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    write_manifest(path)
    return path


def test_what_this_user_wrote_is_taken_also_when_it_was_copied_or_its_adapter_merged(checkpoint, tmp_path):
    require_own(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    require_own(tmp_path / "copy")
    merged = checkpoint / MODEL_INSIDE_CHECKPOINT / "tokenizer.json"
    merged.write_text("{}")
    require_own(checkpoint)


def test_the_key_is_for_this_user_alone(checkpoint, key_folder):
    key = key_folder / provenance.KEY_FILE
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(key.read_bytes()) == 32
    assert [file.name for file in key_folder.iterdir()] == [provenance.KEY_FILE]
    key.chmod(0o644)
    with pytest.raises(CheckpointError, match="not signed"):
        require_own(checkpoint)


def test_another_users_checkpoint_is_whole_and_not_ones_own(checkpoint, key_folder):
    shutil.rmtree(key_folder)
    require_whole(checkpoint)
    with pytest.raises(CheckpointError, match=r"not signed with the key of this user\. Give --trust"):
        newest_whole_checkpoint(checkpoint.parent)
    assert newest_whole_checkpoint(checkpoint.parent, trust=True) == (checkpoint, [])
    assert checkpoint.is_dir()  # it is not damaged


def without_manifest(checkpoint):
    (checkpoint / MANIFEST).unlink()


def with_another_program(checkpoint):
    """What somebody would do who cannot sign: change a file, and what the manifest says of it."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / "algorithm_state.pkl").write_bytes(pickle.dumps(Program("ran")))
    write_manifest(checkpoint)
    changed = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**changed, "signature": manifest["signature"]}))


def with_a_further_file(checkpoint):
    (checkpoint / "state.msgpack").write_bytes(b"")  # RLlib takes it before a pickle


def with_a_link(checkpoint):
    (checkpoint / "learner_group" / "learner" / "optimizer").symlink_to(checkpoint.parent)


def with_a_signature_of_another_kind(checkpoint):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "signature": ["\ud800"]}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_manifest, r"has no manifest\.json"),
        (with_another_program, "not signed"),
        (with_a_further_file, r"state\.msgpack was added"),
        (with_a_link, "optimizer was added"),
        (with_a_signature_of_another_kind, "not signed"),
    ],
)
def test_what_somebody_else_may_have_changed_is_refused(checkpoint, change, reason):
    change(checkpoint)
    require_whole(checkpoint)
    with pytest.raises(CheckpointError, match=reason):
        require_own(checkpoint)


def test_the_model_of_a_foreign_checkpoint_is_exported_without_loading_a_pickle(checkpoint, key_folder, tmp_path):
    for file in (
        "algorithm_state.pkl",
        "learner_group/state.pkl",
        f"{MODEL_INSIDE_CHECKPOINT}/class_and_ctor_args.pkl",
    ):
        (checkpoint / file).write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    write_manifest(checkpoint)
    shutil.rmtree(key_folder)
    assert (export_model(checkpoint, tmp_path / "model") / "config.json").is_file()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "", "a\0b"])
def test_a_manifest_names_only_files_inside(checkpoint, name):
    manifest = {"files": {name: {"bytes": 1, "sha256": "0"}}}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no file inside it"):
        require_whole(checkpoint)


def test_without_a_place_for_a_key_only_this_process_takes_its_checkpoints(checkpoint, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "file"))
    write_manifest(checkpoint)
    require_own(checkpoint)
    assert "can be resumed elsewhere with --trust alone" in caplog.text
    provenance._key_of_this_process.cache_clear()  # as in another process
    with pytest.raises(CheckpointError, match="not signed"):
        require_own(checkpoint)


def test_a_sweep_continues_only_where_it_was_begun(key_folder, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    provenance.sign_folder(folder)
    # What Tune looks for; nothing is unpickled.
    for name in ("tuner.pkl", "trainable.pkl", "experiment_state-1.json"):
        (folder / name).write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    Sweep(SimpleNamespace(), folder).require_folder(resume=True)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for mark in ((copy / provenance.MARK).read_bytes(), b"[]", b"\xff", None):
        (copy / provenance.MARK).write_bytes(mark) if mark else (copy / provenance.MARK).unlink()
        with pytest.raises(CheckpointError, match="was not begun here by this user"):
            Sweep(SimpleNamespace(), copy).require_folder(resume=True)
    Sweep(SimpleNamespace(), copy).require_folder(resume=True, trust=True)
    assert not (tmp_path / "ran").exists()


class UnpicklingAlgorithm(FakeAlgorithm):
    """Restores as RLlib does."""

    def restore_from_path(self, path):
        pickle.loads(Path(path, "algorithm_state.pkl").read_bytes())
        super().restore_from_path(path)


def test_a_downloaded_run_is_read_and_resumed_only_with_trust(key_folder, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("trial_ray.algorithms.config.GRPOConfig.build_algo", lambda self: UnpicklingAlgorithm())
    monkeypatch.setattr("trial_ray.runs.ray_session._start", lambda logs: None)
    experiment, run = tmp_path / "experiment.py", tmp_path / "run"
    experiment.write_text(EXPERIMENT)
    assert cli.main(["train", str(experiment), "--out", str(run)]) == 0
    [checkpoint] = list_checkpoints(run / "checkpoints")
    # Somebody else's: signed with another key.
    (checkpoint / "algorithm_state.pkl").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    write_manifest(checkpoint)
    shutil.rmtree(key_folder)
    resume = ["train", str(experiment), "--resume", str(run), "--iterations", "4"]
    capsys.readouterr()
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(resume) == 2
    assert "--trust" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert cli.main([*resume, "--trust"]) == 0
    assert (tmp_path / "ran").exists()  # so that the refusal above means something

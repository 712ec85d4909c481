"""Runs that are kept at a URI: trained, resumed and read there by the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_fakes import iterations, read
from failing_storage import failing_storage

from trial_ray import cli
from trial_ray.files import CACHE_VARIABLE
from trial_ray.runs.checkpoints import (
    ADAPTER_INSIDE_CHECKPOINT,
    ADAPTER_MARK,
    MODEL_INSIDE_CHECKPOINT,
    list_checkpoints,
)
from trial_ray.runs.storage import StoredCopy
from trial_ray.runs.stored_run import local_folder


@pytest.fixture
def stored(train, tmp_path, monkeypatch):
    """URI of a run of three iterations, each with a checkpoint, of which two are kept."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    uri = f"file://{tmp_path}/bucket/größe run 1"
    train("--out", uri, "--checkpoint-every", 1)
    return uri


@pytest.fixture
def there(tmp_path):
    return tmp_path / "bucket" / "größe run 1"


def test_a_run_at_a_uri_is_there_whole_and_continues_on_another_machine(
    train, stored, there, tmp_path, monkeypatch, capsys
):
    assert {"run.json", "metrics.jsonl", "resolved_config.json", "experiment.py", "report.html", "summary.json"} <= {
        path.name for path in there.iterdir()
    }
    assert [path.name for path in list_checkpoints(there / "checkpoints")] == ["000002", "000003"]
    assert read(there / "run.json")["state"] == "done"
    assert iterations(there) == [1, 2, 3]
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    train("--resume", stored, "--iterations", 5, code=2)
    assert "is not signed with the key of this user" in capsys.readouterr().err
    train("--resume", stored, "--iterations", 5, "--trust")
    assert iterations(there) == [1, 2, 3, 4, 5]
    assert read(there / "summary.json")["iterations"] == 5
    assert [path.name for path in list_checkpoints(there / "checkpoints")] == ["000003", "000005"]
    assert f"stored in {stored}" in capsys.readouterr().out


def test_a_copy_follows_the_run_and_has_the_checkpoints_that_a_command_reads(stored, there, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "reader"))

    def checkpoints(folder):
        return [path.name for path in list_checkpoints(folder / "checkpoints")]

    copy = StoredCopy(stored, 1).fetch()
    assert checkpoints(copy) == ["000003"]
    (copy / "viewer").mkdir()
    (copy / "viewer" / "index.html").write_text("made here")
    assert checkpoints(StoredCopy(stored, None).fetch()) == ["000002", "000003"]
    shutil.rmtree(there / "checkpoints" / "000002")
    (there / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert StoredCopy(stored, None).fetch() == copy
    assert checkpoints(copy) == ["000003"]
    assert iterations(copy) == [1]
    assert (copy / "viewer" / "index.html").exists()
    one = StoredCopy(f"{stored}/checkpoints/000003", 0).fetch()
    assert json.loads((one / "state.json").read_text()) == {"iteration": 3}
    assert (one.parents[1] / "run.json").exists()


def test_a_copy_keeps_the_model_that_a_command_merged_until_its_adapter_is_another(
    stored, there, tmp_path, monkeypatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "reader"))
    inside = Path("checkpoints", "000003")
    adapter = there / inside / ADAPTER_INSIDE_CHECKPOINT / ADAPTER_MARK
    adapter.parent.mkdir(parents=True)
    adapter.write_text("{}")
    merged = StoredCopy(stored, None).fetch() / inside / MODEL_INSIDE_CHECKPOINT / "model.safetensors"
    merging = merged.parents[1] / ".hf.1.partial" / "model.safetensors"
    for path in (merged, merging):
        path.parent.mkdir(parents=True)
        path.write_text("made here")
    StoredCopy(stored, None).fetch()
    assert merged.exists()
    adapter.write_text('{"r": 8}')
    StoredCopy(stored, None).fetch()
    assert not merged.exists()
    assert merging.exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["report", "file:///nowhere/at all"], "is not in a run: there is no run.json in it or above"),
        (["sweep", "FILE", "--out", "s3://bucket/sweep"], "s3:/bucket/sweep was a URI; expected a local path"),
        (["export", "sftp://host/run", "out"], "Expected a URI such as s3://BUCKET/FOLDER"),
        (["inspect", "s3://AKIAKEY:sec/ret@bucket/run"], "contains credentials"),
        (["train", "FILE", "--out", "s3://bucket/run?session_token=secret"], "contains credentials"),
        (["train", "FILE", "--resume", "file:///nowhere/run"], "is not a run folder"),
    ],
)
def test_a_uri_that_cannot_be_used_is_refused_and_no_secret_is_shown(
    train, tmp_path, monkeypatch, capsys, command, words
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert cli.main([str(train.file) if word == "FILE" else word for word in command]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert words in error
    assert not any(word in error for word in ("AKIAKEY", "secret", "sec/ret"))


def test_a_storage_that_refuses_is_told_before_anything_starts(train, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    failing_storage(monkeypatch, tmp_path / "bucket").broken = True
    for arguments in (["--out", "s3://bucket/run"], ["--resume", "s3://bucket/run"]):
        assert cli.main(["train", str(train.file), *arguments]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert "s3://bucket/run cannot be used: the storage is broken. Expected a storage that responds" in error
    assert cli.main(["report", "s3://bucket/run"]) == 2


def test_runs_of_one_name_at_two_servers_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    ports = [f"s3://bucket/run?scheme=http&endpoint_override=127.0.0.1:{port}" for port in (1, 2)]
    assert len({local_folder(uri) for uri in ports}) == 2

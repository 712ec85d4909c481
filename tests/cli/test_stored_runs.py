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
def use_cache(tmp_path, monkeypatch):
    """Function that makes a folder of this test the cache, as on another machine."""

    def use(name):
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / name))

    use("cache")
    return use


@pytest.fixture
def there(tmp_path):
    return tmp_path / "bucket" / "größe run 1"


@pytest.fixture
def stored(train, there, use_cache):
    """URI of a run of three iterations, each with a checkpoint, of which two are kept."""
    uri = f"file://{there}"
    train("--out", uri, "--checkpoint-every", 1)
    return uri


def checkpoints(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def test_stored_run_is_complete_and_continues_on_another_machine(train, stored, there, use_cache, capsys):
    assert {"run.json", "metrics.jsonl", "resolved_config.json", "experiment.py", "report.html", "summary.json"} <= {
        path.name for path in there.iterdir()
    }
    assert checkpoints(there) == ["000002", "000003"]
    assert read(there / "run.json")["state"] == "done"
    assert iterations(there) == [1, 2, 3]
    use_cache("elsewhere")
    train("--resume", stored, "--iterations", 5, code=2)
    assert "is not signed with the key of this user" in capsys.readouterr().err
    train("--resume", stored, "--iterations", 5, "--trust")
    assert iterations(there) == [1, 2, 3, 4, 5]
    assert read(there / "summary.json")["iterations"] == 5
    assert checkpoints(there) == ["000003", "000005"]
    assert f"stored in {stored}" in capsys.readouterr().out


def test_copy_follows_the_run_and_has_the_needed_checkpoints(stored, there, use_cache):
    use_cache("reader")
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


def test_copy_keeps_a_merged_model_until_its_adapter_changes(stored, there, use_cache):
    use_cache("reader")
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


def test_broken_storage_is_found_before_anything_starts(train, tmp_path, use_cache, monkeypatch, capsys):
    failing_storage(monkeypatch, tmp_path / "bucket").broken = True
    for arguments in (["--out", "s3://bucket/run"], ["--resume", "s3://bucket/run"]):
        assert cli.main(["train", str(train.file), *arguments]) == 2
        assert "s3://bucket/run cannot be used: the storage is broken" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["report", "s3://bucket/run"]) == 2


def test_runs_of_one_name_on_two_servers_have_two_folders(use_cache):
    uris = [f"s3://bucket/run?scheme=http&endpoint_override=127.0.0.1:{port}" for port in (1, 2)]
    assert len(set(map(local_folder, uris))) == 2

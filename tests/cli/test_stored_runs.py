"""Runs that are kept at a URI: trained, resumed and read there by the command line."""

import shutil

import pytest
from cli_fakes import iterations, read
from failing_storage import failing_storage

from trial_ray import cli
from trial_ray.files import write_text
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
        monkeypatch.setenv("TRIAL_RAY_CACHE", f"{tmp_path}/{name}")

    use("cache")
    return use


@pytest.fixture
def there(tmp_path):
    return tmp_path / "bucket/größe run 1"


@pytest.fixture
def stored(train, there, use_cache):
    """URI of a run of three iterations, each with a checkpoint, of which two are kept."""
    uri = f"file://{there}"
    train(f"--out '{uri}' --checkpoint-every 1")
    return uri


def checkpoints(folder):
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def test_stored_run_is_complete_and_continues_on_another_machine(train, stored, there, use_cache, capsys):
    assert (there / "report.html").is_file()
    assert checkpoints(there) == ["000002", "000003"]
    assert read(there / "run.json")["state"] == "done"
    use_cache("elsewhere")
    more = f"--resume '{stored}' --iterations"
    train(more, 5, code=2)
    assert "is not signed with the key of this user" in capsys.readouterr().err
    train(more, 5, "--trust")
    assert iterations(there) == [1, 2, 3, 4, 5]
    assert checkpoints(there) == ["000003", "000005"]
    use_cache("cache")
    train(more, 6, "--trust")
    here = local_folder(stored)
    assert iterations(there) == iterations(here) == [1, 2, 3, 4, 5, 6]
    assert len(list(here.parent.glob("*.replaced-*"))) == 1


def test_copy_follows_the_run_and_keeps_what_was_made_of_it(stored, there, use_cache):
    use_cache("reader")
    copy = StoredCopy(stored, 1).fetch()
    assert checkpoints(copy) == ["000003"]
    adapter = there / "checkpoints/000003" / ADAPTER_INSIDE_CHECKPOINT / ADAPTER_MARK
    write_text(adapter, "{}")
    whole = StoredCopy(stored, None)
    assert checkpoints(whole.fetch()) == ["000002", "000003"]
    merged = copy / "checkpoints/000003" / MODEL_INSIDE_CHECKPOINT / "model.safetensors"
    merging = merged.parents[1] / ".hf.1.partial/model.safetensors"
    page = copy / "viewer/index.html"
    for path in (merged, merging, page):
        write_text(path, "made here")
    shutil.rmtree(there / "checkpoints/000002")
    (there / "metrics.jsonl").write_text('{"iteration": 1}\n')
    assert whole.fetch() == copy
    assert checkpoints(copy) == ["000003"]
    assert iterations(copy) == [1]
    assert page.exists()
    assert merged.exists()
    adapter.write_text('{"r": 8}')  # the merged model is no longer that of the adapter
    whole.fetch()
    assert not merged.exists()
    assert merging.exists()
    one = StoredCopy(f"{stored}/checkpoints/000003", 0).fetch()
    assert read(one / "state.json") == {"iteration": 3}
    assert (one.parents[1] / "run.json").exists()


def test_broken_storage_is_found_before_anything_starts(train, tmp_path, use_cache, monkeypatch, capsys):
    failing_storage(monkeypatch, tmp_path / "bucket").broken = True
    for option in ("--out", "--resume"):
        assert cli.main(f"train {train.file} {option} s3://bucket/run".split()) == 2
        assert "the storage is broken" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["report", "s3://bucket/run"]) == 2


def test_runs_of_one_name_on_two_servers_have_two_folders(use_cache):
    uri = "s3://bucket/run?scheme=http&endpoint_override=127.0.0.1:"
    assert local_folder(uri + "1") != local_folder(uri + "2")

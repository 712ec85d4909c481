"""Records that were cut, changed or written by another user are read or refused with a typed error, and never become paths."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile_input import changed_content, refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rejections import rejected
from synthetic_groups import synthetic_groups

from trial_ray import TRIALConfig
from trial_ray.errors import CheckpointError, TrialRayError, UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import write_json, write_text
from trial_ray.learner.recording import UpdateRecord
from trial_ray.rollout.recording import partitions, read_trajectories, write_groups
from trial_ray.runs.config_record import from_record, load_record, to_record
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import RecordedRun, read_runs
from trial_ray.runs.storage import Storage, download
from trial_ray.trajectory import EpisodeResult

CONFIG = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "train"}).rl_module(model_path="m")
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded")
    run = RunFolder.create(path / "run", CONFIG, Path(__file__), [])
    run.log(1, {"env_runners/success_rate": 0.5})
    UpdateRecord(1, ["a"], {"num_env_steps_sampled_lifetime": 1}, 1, "0-1", "1-1").write(run.training)
    EvaluationResult({"split": "train"}, [EpisodeResult("t", "f", True, 1.0, 2, "terminated")]).save(
        run.evaluations / "before.json"
    )
    return run.path


READERS = {
    "run.json": lambda path: RunFolder.reopen(path.parent).state(),
    "resolved_config.json": lambda path: refused(load_record(path).validate, ValueError),
    "metrics.jsonl": lambda path: RunFolder(path.parent).drop_records_after(1),
    "evaluations/before.json": EvaluationResult.load,
    "training/iteration=00001/_update.json": lambda path: UpdateRecord.read(path.parents[1], 1),
}


def read(folder, name, content):
    """Return the reasons for missing parts of a run with another content of a file, and the data or the error of its reader."""
    changed = folder.with_name("changed")
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(folder, changed)
    (changed / name).write_bytes(content)
    return " ".join(RecordedRun(changed).reasons()), refused(lambda: READERS[name](changed / name))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_changed_files_are_read_or_refused(folder, data):
    name = data.draw(st.sampled_from(sorted(READERS)))
    read(folder, name, data.draw(changed_content(folder / name)))


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        b'{"schema": "trial_ray/run", "schema_version": 1}',
        {"settings": []},
        {"environments": [{"labels": {}}]},
        {"earlier": [3]},
        {"after_iteration": "x"},
    ],
    ids=range(6),
)
def test_files_of_another_shape_are_refused(folder, content):
    if isinstance(content, bytes):
        _, outcome = read(folder, "run.json", content)
    else:
        record = {"method": "grpo", "settings": {}, "environments": []} | content
        reasons, outcome = read(folder, "resolved_config.json", json.dumps(record).encode())
        assert "resolved" in reasons
    assert isinstance(outcome, CheckpointError)


@pytest.mark.parametrize(("name", "value"), [("env", []), ("group_size", "8")])
def test_a_setting_of_another_type_is_refused(name, value):
    record = to_record(CONFIG)
    record["settings"][name] = value
    rejected(name, from_record, record)


def test_damaged_lines_of_metrics_are_dropped(tmp_path):
    whole = [json.dumps({"iteration": number, "a": 1.5}) for number in (1, 2, 3)]
    damaged = [b'{"iteration": "2"}', b'{"iteration": true}', b"[1]", b"\xff\x00", DEEP, b"{"]
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b"\n".join([*(line.encode() for line in whole), *damaged]))
    folder.drop_records_after(2)
    assert folder.metrics.read_text().splitlines() == whole[:2]


def test_a_flipped_bit_in_parquet_is_detected(tmp_path):
    path = write_groups(tmp_path, 1, synthetic_groups(), "runner001")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserInputError):
        read_trajectories(tmp_path)


def test_only_decimal_names_are_iterations(tmp_path):
    for name in ("00002", "x", "", "-1", "\u0663", "9" * 40):
        (tmp_path / f"iteration={name}").mkdir()
    assert list(partitions(tmp_path)) == [2]


def test_lone_surrogates_are_written_as_escapes(tmp_path):
    value = {"task \udc80": "\ud800 and text"}
    assert json.loads(write_json(tmp_path / "x.json", value).read_text(encoding="utf-8")) == value
    assert write_text(tmp_path / "x.log", "a \udc80").read_text(encoding="utf-8") == "a \\udc80"


@pytest.mark.parametrize("path", [".", "/dev/null"])
def test_a_folder_or_device_is_never_replaced(path):
    with pytest.raises(UserInputError):
        write_text(path, "text")


# -- names of other users are never paths --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../../x", "..", "{0}/absolute/x", "a/b", "a\0b", "x" * 5000, "CON", "\u202e\u0130é", "", "-"],
    ids=range(10),
)
def test_a_hostile_name_stays_inside_its_folder(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "a/b/sweep"
    name = name.format(tmp_path)
    # Runs outside of a sweep are not read as its trials.
    for outside in ("a/x", "absolute/x"):
        write_json(tmp_path / outside / "run.json", {"schema": "trial_ray/run", "schema_version": 1, "state": "stolen"})
    write_json(folder / "sweep.json", {"trials": [{"name": name}]})
    (trial,) = read_runs(folder)
    assert trial.path.parent == folder
    assert trial.state == ""
    # The server of a storage lists a file of this name.
    info = SimpleNamespace(path=f"bucket/run/{name}", is_file=True, size=1, mtime_ns=1)
    storage = Storage("mock://bucket/run", SimpleNamespace(get_file_info=lambda selector: [info]), "bucket/run")
    copy = tmp_path / "1/2/copy"
    with suppress(TrialRayError, OSError):
        monkeypatch.setattr(Storage, "fetch", lambda storage, name, target: target.write_bytes(b"1"))
        download(storage, copy, storage.files())
    assert all(path.is_relative_to(copy) for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".json")
    with suppress(TrialRayError):
        cached = Storage.open(f"file:///{name}").cached("copies")
        assert Path(os.path.normpath(cached)).is_relative_to(tmp_path / "cache/storage/copies")

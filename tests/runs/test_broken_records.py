"""Records of a run that were cut, changed or written by somebody else: what tests/faults/test_hostile_input.py found."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import TRIALConfig
from trial_ray.errors import CheckpointError, ConfigError, UserInputError
from trial_ray.files import write_json, write_text
from trial_ray.rollout.partitions import partitions
from trial_ray.rollout.recording import read_trajectories, write_groups
from trial_ray.runs.config_record import from_record, to_record
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import RecordedRun
from trial_ray.runs.session import TrainingSession

DEEP = "[" * 100_000
CONFIG = TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "train"})


@pytest.mark.parametrize("content", ["3", DEEP, '{"schema": "trial_ray/run", "schema_version": 1}'], ids=range(3))
def test_a_file_of_another_shape(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError):
        RunFolder.reopen(tmp_path).state()


@pytest.mark.parametrize(("name", "value"), [("env", []), ("group_size", "8")])
def test_a_recorded_setting_of_another_type(name, value):
    record = to_record(CONFIG)
    record["settings"][name] = value
    with pytest.raises(CheckpointError, match=f"{name} = .* is not a value of that setting"):
        from_record(record)


@pytest.mark.parametrize(
    "record",
    [
        {"settings": []},
        {"environments": [{"labels": {}}]},
        {"settings": {"max_staleness": "many"}},
        {"earlier": [3]},
        {"after_iteration": "x"},
    ],
)
def test_a_config_of_another_shape_is_named_as_missing(tmp_path, record):
    whole = {"method": "grpo", "settings": {}, "environments": []}
    (tmp_path / "resolved_config.json").write_text(json.dumps(whole | record))
    assert "resolved" in " ".join(RecordedRun(tmp_path).reasons())


def test_lone_surrogates_are_written_as_escapes(tmp_path):
    value = {"task \udc80": "\ud800 and text"}
    assert json.loads(write_json(tmp_path / "x.json", value).read_text(encoding="utf-8")) == value
    assert write_text(tmp_path / "x.log", "a \udc80").read_text(encoding="utf-8") == "a \\udc80"


@pytest.mark.parametrize("path", ["", ".", "/dev/null"])
def test_a_folder_or_a_device_is_never_replaced_by_a_file(path):
    with pytest.raises(UserInputError, match="is not a file that can be written"):
        write_text(path, "text")


def test_folders_with_other_names_are_no_iterations(tmp_path):
    for name in ("00002", "x", "", "-1", "\u0663", "9" * 40):
        (tmp_path / f"iteration={name}").mkdir()
    assert list(partitions(tmp_path)) == [2]


def test_a_flipped_bit_in_a_page_of_parquet_is_seen(tmp_path):
    path = write_groups(tmp_path, 1, synthetic_groups(vocab_size=400, seed=1), "runner001")
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(0)
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserInputError, match="damaged"):
        read_trajectories(tmp_path)


def test_metrics_of_a_resumed_run_lose_their_damaged_lines_alone(tmp_path):
    whole = [json.dumps({"iteration": number, "a": 1.5}) for number in (1, 2, 3)]
    damaged = [
        b'{"iteration": "2"}',
        b'{"iteration": null}',
        b'{"iteration": true}',
        b'{"iteration": 1.5}',
        b'{"iteration": -1e400}',
        b"[1]",
        b"\xff\x00\xfe",
        DEEP.encode(),
        b'{"iteration": 1',
    ]
    folder = RunFolder(tmp_path)
    folder.metrics.write_bytes(b"\n".join([*(line.encode() for line in whole), *damaged]))
    folder.drop_records_after(2)
    folder.log(3, {"a": 2.5})
    assert folder.metrics.read_text().splitlines() == [*whole[:2], json.dumps({"iteration": 3, "a": 2.5})]


def test_a_run_that_recorded_something_is_not_discarded(tmp_path):
    (tmp_path / "run.py").write_text("config = 1")
    for recorded in (True, False):
        folder = RunFolder.create(tmp_path / str(recorded), CONFIG, tmp_path / "run.py", ["x"])
        if recorded:
            write_groups(folder.trajectories, 1, [], "runner001")
        session = TrainingSession(CONFIG, {}, folder, Console(file=io.StringIO()))
        session._record_failure(ConfigError("no such split"))
        assert folder.path.exists() == recorded

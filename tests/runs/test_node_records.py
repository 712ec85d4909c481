"""What other nodes recorded comes to the run's folder, unless nodes share it."""

import subprocess
import sys

import pytest
from ray_nodes import cluster_of

from trial_ray.files import write_text
from trial_ray.runs.node_records import send_files

NAME = "trajectories/iteration=00001/runner001.parquet"


def record(folder, name=NAME):
    write_text(folder / name, name)


def test_a_node_hands_over_what_it_recorded_once(tmp_path):
    record(tmp_path)
    record(tmp_path, "training/iteration=00001/learner01.parquet")
    record(tmp_path, "training/iteration=00002/.learner01.unfinished")
    files = send_files(tmp_path, drop=False)
    assert files.keys() == {NAME, "training/iteration=00001/learner01.parquet"}
    assert files[NAME] == NAME.encode()
    assert send_files(tmp_path, drop=False) == {}


def test_a_node_drops_recordings_alone(tmp_path):
    record(tmp_path)
    (tmp_path / "trajectories/notes.txt").write_text("of another user")
    assert send_files(tmp_path, drop=True) == {}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


def test_a_node_that_shares_the_folder_hands_over_and_removes_nothing(tmp_path):
    record(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert send_files(tmp_path, drop=True) is None
    assert (tmp_path / NAME).exists()


GATHER = """
import sys
from pathlib import Path
import ray
from trial_ray.runs.node_records import NodeRecords

here, there = map(Path, sys.argv[1:3])
ray.init(log_to_driver=False)
records = NodeRecords(here, there)
old = there / "trajectories/iteration=00009/old.parquet"
old.parent.mkdir(parents=True)
old.touch()
records.drop()
new = there / sys.argv[3]
new.parent.mkdir(parents=True)
new.write_bytes(sys.argv[3].encode())
while not (here / sys.argv[3]).exists():  # A slow node answers a later call.
    records.gather()
print(*(path.relative_to(here.parent) for path in sorted(here.parent.rglob("*.parquet"))))
"""


@pytest.mark.long
def test_files_of_another_node_come_here(tmp_path):
    here = tmp_path / "here"
    there = tmp_path / "there"
    with cluster_of("worker") as nodes:
        printed = subprocess.run(
            [sys.executable, "-c", GATHER, here, there, NAME],
            env=nodes.environment | {"RAY_ADDRESS": nodes.address},
            check=True,
            capture_output=True,
            text=True,
            timeout=600,
        ).stdout
    assert printed.splitlines()[-1] == f"here/{NAME}"
    assert (here / NAME).read_bytes() == NAME.encode()

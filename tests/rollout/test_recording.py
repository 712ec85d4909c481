"""Recorded trajectories are read as they were written."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewritten_parquet import replace_content, rewrite
from synthetic_groups import synthetic_groups

from trial_ray.errors import UserInputError
from trial_ray.files import escaped, unescaped
from trial_ray.rollout.recording import (
    SCHEMA_VERSION,
    VERSION_KEY,
    read_groups,
    read_trajectories,
    read_turns,
    write_groups,
)
from trial_ray.trajectory import Trajectory


def make_group(seed):
    """Two rollouts, the first with unusual values."""
    (group,) = synthetic_groups(500, num_groups=1, group_size=2, seed=seed, max_turns=12)
    first = group.trajectories[0]
    first.seed, first.environment, first.ended = 2**40 + seed, "ALFWorld-v0", "turn_limit"
    first.turns[0] = dataclasses.replace(
        first.turns[0],
        observation="You see a <b>mug</b> ☕.",
        outcome="You pick up\nthe mug 1.",
        reward=0.1 + 0.2,
        actions=("take mug 1", ""),
        answers=("You pick up\nthe mug 1.", "No \ud800 tool."),
        prompt_cut="history",
        invalid_action=True,
    )
    return group


def assert_same(found, expected):
    """Compare groups or trajectories with all their fields."""
    np.testing.assert_equal([*map(dataclasses.asdict, found)], [*map(dataclasses.asdict, expected)])


def test_trajectories_come_back_equal(tmp_path):
    """A failed rollout without turns is kept, but has no row among the turns."""
    groups = [make_group(seed) for seed in range(12)]
    failed = Trajectory("task/0", "pick", 3, ended="failed", error="EngineError: gone", failed_by="engine")
    groups[0].trajectories.insert(0, failed)
    write_groups(tmp_path, 12, groups, "runner001")
    assert len(read_turns(tmp_path)) == sum(map(len, groups))
    found = read_trajectories(tmp_path)
    assert_same(found, [each for group in groups for each in group.trajectories])
    turn = found[1].turns[0]
    assert turn.prompt_ids.dtype == turn.response_ids.dtype == np.int32
    assert (turn.logprobs.dtype, type(turn.valid)) == (np.float32, bool)


def test_a_restarted_runner_never_overwrites_its_own_files(tmp_path):
    paths = {write_groups(tmp_path, 4, [make_group(seed)], "runner001-00000") for seed in range(3)}
    assert len(paths) == 3
    assert len(read_trajectories(tmp_path, iteration=4)) == 6


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    write = Path.write_bytes

    def fail(path, content):
        write(path, content[:4])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_groups(tmp_path, 0, [make_group(0)], "w")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_of_other_versions_and_incomplete_ones_are_refused(tmp_path):
    file = write_groups(tmp_path, 0, [make_group(0)], "w")
    table = pq.read_table(file, partitioning=None)

    def require_refusal(found):
        with pytest.raises(UserInputError, match=found):
            read_trajectories(tmp_path)

    for change, found in (
        (table.drop_columns(["score"]), f"lacks columns of schema version {SCHEMA_VERSION}: score"),
        (table.replace_schema_metadata({VERSION_KEY: b"3"}), f"schema version 3; expected {SCHEMA_VERSION}"),
        (table.replace_schema_metadata(None), f"schema version none; expected {SCHEMA_VERSION}"),
    ):
        file = rewrite(change, file)
        require_refusal(found)
    file = replace_content(file, file.read_bytes()[:-20])
    require_refusal("not a complete Parquet file")
    file.rename(file.with_name("renamed.parquet"))
    require_refusal("is damaged: the checksum in its name is missing")


@given(st.text(alphabet="\\ud80cf5\ud800\udc80\udfff☕"))
def test_every_text_is_stored_reversibly(text):
    stored = escaped(text)
    stored.encode("utf-8")
    assert unescaped(stored) == text


def test_groups_are_found_in_the_order_asked_for_and_in_earlier_iterations(tmp_path):
    groups = [make_group(seed) for seed in range(4)]
    write_groups(tmp_path, 2, groups[2:], "w")
    write_groups(tmp_path, 1, groups[:2], "w")
    wanted = [groups[index] for index in (3, 1, 2)]
    assert_same(read_groups(tmp_path, [group.group_id for group in wanted], iteration=2), wanted)
    with pytest.raises(UserInputError, match="1 of the 2 groups of iteration 1"):
        read_groups(tmp_path, [groups[0].group_id, groups[3].group_id], iteration=1)


def test_names_that_would_leave_the_folder_are_refused(tmp_path):
    for writer, iteration in {"../evil": 0, "": 0, "w": -1}.items():
        with pytest.raises(UserInputError):
            write_groups(tmp_path, iteration, [make_group(0)], writer)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_a_clear_error(tmp_path):
    with pytest.raises(UserInputError, match="No trajectories"):
        read_turns(tmp_path)
    write_groups(tmp_path, 1, [make_group(0)], "w")
    with pytest.raises(UserInputError, match="iteration=00002"):
        read_trajectories(tmp_path, iteration=2)

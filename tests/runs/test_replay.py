"""Data that a replay reads from a run folder, and errors for missing data; ``tests/e2e`` tests the update itself."""

import shutil
from pathlib import Path

import pytest
from rejections import rejected
from small_learners import config_of
from synthetic_groups import synthetic_groups

from trial_ray.cli import main
from trial_ray.files import read_json, write_json, write_text
from trial_ray.learner.recording import UpdateRecord
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.checkpoints import CHECKPOINT_MARK, MANIFEST, write_manifest
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.replay import Replay


@pytest.fixture
def run(tmp_path):
    """Return a run of four iterations, without training in the third, and with checkpoints of the first and the last."""
    config = config_of("trial", "some/model", lr=0.5)
    folder = RunFolder.create(tmp_path / "run", config, Path(__file__), [])
    for iteration in (1, 2, 4):
        groups = synthetic_groups(seed=iteration)
        write_groups(folder.trajectories, iteration, groups, "runner001")
        ids = [group.group_id for group in reversed(groups)]
        UpdateRecord(iteration, ids, {}, 1, "0-1", "1-1").write(folder.training)
    for name in ("000001", "000004"):
        checkpoint = folder.checkpoints / name
        write_text(checkpoint / CHECKPOINT_MARK, "{}")
        write_manifest(checkpoint)
    return folder


def test_a_replay_keeps_the_order_of_the_groups(run):
    replay = Replay.of(run, 2)
    assert [group.group_id for group in replay.groups] == replay.record.group_ids
    assert replay.checkpoint == run.checkpoints / "000001"
    assert Replay.of(run, 1).checkpoint is None
    assert replay.config.lr == 0.5
    assert replay.changed is False
    assert replay.config.training_folder is None


def test_method_and_settings_can_be_replaced(run):
    replay = Replay.of(run, 2, "sdar", ["gate_slope=2", "training_folder=elsewhere"])
    config = replay.config
    assert type(config).__name__ == "SDARConfig"
    assert config.gate_slope == 2
    assert config.lr == 0.5
    assert config.training_folder == "elsewhere"
    assert Replay.of(run, 2, "trial").changed is False
    assert Replay.of(run, 2, overrides=["lr=0.5"]).changed is True


def test_missing_data_are_named(run):
    rejected(r"000003 does not exist.* 1, 2\.", Replay.of, run, 4)
    shutil.rmtree(run.trajectories / "iteration=00002")
    assert main(f"replay {run.path} --iteration 2".split()) == 2


def test_settings_that_need_other_state_are_refused(run):
    rejected("teacher_sync_iterations", Replay.of, run, 2, "serl")
    assert Replay.of(run, 1, "serl").config.teacher_sync_iterations == 10
    rejected("lora_rank is 4", Replay.of, run, 2, overrides=["lora_rank=4"])


def test_the_file_of_a_method_is_run_only_if_named(run, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from trial_ray.algorithms.methods.sdar import SDARConfig\nclass Mine(SDARConfig): pass\nCONFIG = Mine\n"
    )
    path = run.path / "resolved_config.json"
    record = read_json(path) | {"method": "/elsewhere/mine.py"}
    record["settings"]["gate_slope"] = 4.0
    write_json(path, record)
    rejected(r"--method /elsewhere/mine\.py", Replay.of, run, 2)
    config = Replay.of(run, 2, str(mine)).config
    assert type(config).__name__ == "Mine"
    assert config.gate_slope == 4.0
    assert config.lr == 0.5
    assert type(Replay.of(run, 2, "grpo").config).__name__ == "GRPOConfig"


def test_a_replay_requires_a_whole_checkpoint_of_this_user(run):
    checkpoint = run.checkpoints / "000001"
    (checkpoint / MANIFEST).unlink()
    rejected("another user", Replay.of, run, 2)
    assert Replay.of(run, 2, trust=True).checkpoint == checkpoint
    write_manifest(checkpoint)
    (checkpoint / CHECKPOINT_MARK).write_text("{ }")
    rejected("is damaged", Replay.of, run, 2, trust=True)

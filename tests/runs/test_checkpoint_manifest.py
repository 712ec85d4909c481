"""A damaged checkpoint is named and left out, whatever file the damage is in; the newest whole one is taken."""

from __future__ import annotations

import pytest

from trial_ray.errors import CheckpointError
from trial_ray.runs import checkpoints as checkpoints_module
from trial_ray.runs.checkpoints import (
    ADAPTER_INSIDE_CHECKPOINT,
    ADAPTER_MARK,
    CHECKPOINT_MARK,
    MANIFEST,
    MODEL_INSIDE_CHECKPOINT,
    export_model,
    find_model,
    find_run_folder,
    list_checkpoints,
    newest_whole_checkpoint,
    prune_checkpoints,
    require_whole,
    write_manifest,
)

FILES = {
    CHECKPOINT_MARK: b"{}",
    "algorithm_state.pkl": b"counters",
    "learner_group/learner/optimizer.pt": b"moments",
    f"{MODEL_INSIDE_CHECKPOINT}/config.json": b"{}",
    f"{MODEL_INSIDE_CHECKPOINT}/model.safetensors": b"weights",
}
WEIGHTS = f"{MODEL_INSIDE_CHECKPOINT}/model.safetensors"


@pytest.fixture
def checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    for iteration in (1, 2, 3):
        for name, content in FILES.items():
            path = folder / f"{iteration:06d}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        write_manifest(folder / f"{iteration:06d}")
    return folder


def truncate(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


def change(path):
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def delete(path):
    path.unlink()


# Without its mark a folder is no checkpoint, without a manifest one of an older version.
DAMAGES = [
    (name, damage)
    for name in [*FILES, MANIFEST]
    for damage in (truncate, change, delete)
    if damage is not delete or name not in (CHECKPOINT_MARK, MANIFEST)
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damage_in_any_file_is_seen_and_the_checkpoint_before_is_taken(checkpoints, name, damage):
    newest = checkpoints / "000003"
    damage(newest / name)
    with pytest.raises(CheckpointError, match=r"000003 is damaged: \S+ "):
        require_whole(newest)
    found, damages = newest_whole_checkpoint(checkpoints)
    assert found == checkpoints / "000002"
    assert len(damages) == 1
    assert name in damages[0]
    # Neither saving iteration 3 again nor a later resume meets it; nothing was deleted.
    assert [path.name for path in list_checkpoints(checkpoints)] == ["000001", "000002"]
    assert len(list(checkpoints.glob("000003.damaged-*"))) == 1


def test_where_all_are_damaged_the_first_damage_of_each_is_said(checkpoints):
    for path in list_checkpoints(checkpoints):
        truncate(path / WEIGHTS)
    with pytest.raises(
        CheckpointError, match=r"No checkpoint .* is whole.*000003.*000002.*000001.*has 3 bytes, 7 were"
    ):
        newest_whole_checkpoint(checkpoints)


def test_a_damaged_model_is_not_exported_and_other_damage_does_not_matter_to_it(checkpoints, tmp_path):
    truncate(checkpoints / "000003" / "learner_group/learner/optimizer.pt")
    assert (export_model(checkpoints / "000003", tmp_path / "model") / "model.safetensors").read_bytes() == b"weights"
    change(checkpoints / "000003" / WEIGHTS)
    with pytest.raises(CheckpointError, match="other content than was written"):
        export_model(checkpoints / "000003", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_folder_without_checkpoints_is_a_beginning(tmp_path):
    assert newest_whole_checkpoint(tmp_path / "checkpoints") == (None, [])


def test_a_checkpoint_whose_removal_was_cut_off_is_none_any_more(checkpoints, monkeypatch):
    def cut_off(path, **_):
        (path / MANIFEST).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("trial_ray.runs.checkpoints.shutil.rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(checkpoints, keep=1)
    assert [path.name for path in list_checkpoints(checkpoints)] == ["000002", "000003"]


def test_checkpoints_are_ordered_by_number(tmp_path):
    for name in ("999999", "1000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CHECKPOINT_MARK).touch()
    prune_checkpoints(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["1000000"]


def test_a_model_that_another_command_merged_meanwhile_is_taken(tmp_path, monkeypatch):
    adapter = tmp_path / ADAPTER_INSIDE_CHECKPOINT
    adapter.mkdir(parents=True)
    (adapter / ADAPTER_MARK).touch()
    (tmp_path / CHECKPOINT_MARK).touch()
    write_manifest(tmp_path)

    def merge(adapter, partial):
        for folder in (partial, tmp_path / MODEL_INSIDE_CHECKPOINT):
            folder.mkdir()
            (folder / "config.json").touch()
            (folder / "model.safetensors").touch()

    monkeypatch.setattr(checkpoints_module, "_merge", merge)
    assert find_model(tmp_path) == tmp_path / MODEL_INSIDE_CHECKPOINT


def test_a_run_json_of_another_program_makes_no_run_folder(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "run.json").write_text('{"tool": "other"}')
    assert find_run_folder(tmp_path / "models") is None
    (tmp_path / "run.json").write_text('{"schema": "trial_ray/run", "schema_version": 1')  # cut
    assert find_run_folder(tmp_path / "models") == tmp_path

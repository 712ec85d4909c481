"""Trajectories in formats of other tools: what is in the files, and that ``datasets`` reads its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_tokenizers import published_tokenizer
from synthetic_run import make_run, save_tokenizer

from trial_ray.cli import main
from trial_ray.environments.alfworld import ADAPTER
from trial_ray.models.tiny import build_tokenizer
from trial_ray.reports.exports import SCHEMA, atif_document
from trial_ray.reports.recorded import RecordedTrajectory, TokenTexts, print_trajectory
from trial_ray.reports.records import RunRecord
from trial_ray.rollout.prompts import PromptBuilder
from trial_ray.rollout.recording import read_trajectories, write_groups
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    folder = make_run(tmp_path_factory.mktemp("exported") / "run", tokenizer, 32)
    save_tokenizer(folder, tokenizer)
    hostile = Trajectory("task \udc80", "pick", 3, [], ended="failed", error="gone", failed_by="engine")
    write_groups(folder / "trajectories", 1, [TrajectoryGroup("task \udc80", [hostile])], "runner009")
    return folder


def test_an_atif_document_holds_what_was_recorded(run, tmp_path, capsys):
    assert main(["inspect", str(run), "--export", "atif", "--out", str(tmp_path / "atif")]) == 0
    files = sorted((tmp_path / "atif").glob("iteration=*/*.json"))
    recorded = [each for each in read_trajectories(run / "trajectories") if each.turns]
    assert len(files) == len(recorded) == 32
    documents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    turns = [step for each in documents for step in each["steps"] if step["source"] == "agent"]
    assert len(turns) == sum(len(each.turns) for each in recorded)
    ids = [step["metrics"]["completion_token_ids"] for step in turns]
    assert sorted(ids) == sorted(turn.response_ids.tolist() for each in recorded for turn in each.turns)
    assert all(len(step["metrics"]["logprobs"]) == len(step["metrics"]["completion_token_ids"]) for step in turns)
    assert all("<action>" in step["message"] and step["extra"]["action"] in step["message"] for step in turns)
    assert {each["extra"]["success"] for each in documents} == {True, False}
    assert any(step["extra"].get("turn_weight") is not None for step in turns)


def test_datasets_reads_the_folder_with_the_features_of_its_card(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    assert main(["inspect", str(run), "--export", "datasets", "--out", str(tmp_path / "hub")]) == 0
    loaded = datasets.load_dataset(str(tmp_path / "hub"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.features == datasets.Features.from_arrow_schema(SCHEMA)
    recorded = read_trajectories(run / "trajectories")
    assert loaded["task_id"] == [each.task_id.replace("\udc80", r"\udc80") for each in recorded]
    for row, trajectory in zip(loaded, recorded, strict=True):
        assert row["success"] == trajectory.success
        assert [turn["response_ids"] for turn in row["turns"]] == [t.response_ids.tolist() for t in trajectory.turns]
        assert [turn["action"] for turn in row["turns"]] == [t.action for t in trajectory.turns]
    first = loaded[0]["turns"][0]
    assert first["action"] in first["response"]
    assert first["observation"].split()[0] in first["prompt"]


def test_text_that_the_prompt_opened_is_shown_with_the_response():
    tokenizer = published_tokenizer("qwen3_5_think")
    prompt = PromptBuilder(tokenizer, ADAPTER.template("tagged"), 4096).build(
        task="look", observation="A room.", admissible_actions=["look"], history=[], step=1
    )
    said = "so</think><action>look</action>"
    ids = np.array([*tokenizer.encode(said), tokenizer.eos_token_id], np.int32)
    turn = Turn(
        prompt.ids, ids, np.zeros(len(ids), np.float32), 0, prompt.insert_at, "A room.", "look", True, "", 0.0, "stop"
    )
    trajectory = Trajectory("task", "look", 0, [turn])
    recorded = RecordedTrajectory(1, 1, "group", 0, trajectory, [None], [""])
    run = RunRecord(Path("run"), tokens=TokenTexts(tokenizer))
    step = atif_document(run, recorded)["steps"][1]
    assert step["message"] == f"<think>\n{said}"
    assert step["metrics"]["completion_token_ids"] == ids.tolist()
    assert step["metrics"]["prompt_tokens"] == len(prompt.ids)
    printed = "\n".join(str(part) for part in print_trajectory(recorded, run.tokens))
    assert "  <|im_start|>assistant\n  \nresponse, " in printed
    assert f"  <think>\n  {said}<|im_end|>" in printed


def test_one_iteration_is_exported_alone(run, tmp_path):
    assert main(["inspect", str(run), "--iteration", "2", "--export", "datasets", "--out", str(tmp_path / "hub")]) == 0
    (file,) = (tmp_path / "hub/data").iterdir()
    assert (file.name, pq.read_table(file).num_rows) == ("train-00002.parquet", 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "atif"], "name it, and give neither --text nor --open"),
        (["--export", "atif", "--out", "FULL"], "is not empty"),
        (["--export", "atif", "--text", "--out", "new"], "name it, and give neither --text nor --open"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments, message, run, tmp_path, capsys):
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/file").touch()
    arguments = [str(tmp_path / each) if each in ("FULL", "new") else each for each in arguments]
    assert main(["inspect", str(run), *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_run_whose_records_are_damaged_leaves_no_folder(run, tmp_path, capsys):
    folder = tmp_path / "damaged"
    (folder / "trajectories/iteration=00001").mkdir(parents=True)
    for name in ("run.json", "resolved_config.json"):
        (folder / name).write_bytes((run / name).read_bytes())
    (folder / "trajectories/iteration=00001/a.parquet").write_bytes(b"PAR1")
    assert main(["inspect", str(folder), "--export", "datasets", "--out", str(tmp_path / "hub")]) != 0
    assert "is not exported" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "hub").exists()

"""Data of the viewer's page: texts, token texts and numbers, and the files that contain them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from hostile_texts import HOSTILE
from rewritten_parquet import rewrite
from synthetic_run import make_run, recorded_run, save_tokenizer

from trial_ray.errors import UserInputError
from trial_ray.files import visible
from trial_ray.reports.viewer import script, write_viewer
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.reader import open_run
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn, TokenTexts
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn

CALL = re.compile(r"viewer\.receive\('(\w+)',(\d+),'(.*)'\);\n")


def read(path):
    """Read a data file as a browser does: one call whose last argument is a string literal with JSON in it."""
    literal = CALL.fullmatch(path.read_text(encoding="ascii"))[3]
    assert not re.search(r"(?<!\\)(\\\\)*'", literal), "the literal ends early"
    return json.loads(re.sub(r"\\(.)", r"\1", literal))


def test_text_cannot_leave_its_script_file(tmp_path):
    for text in HOSTILE:
        path = tmp_path / "text-0.js"
        path.write_text(script("text", 0, [text]), encoding="ascii")
        written = path.read_text(encoding="ascii")
        assert "<" not in written
        assert written.count("\n") == 1
        assert read(path) == [text]
        assert visible(text).encode().decode().isprintable()


def test_control_characters_are_visible():
    assert visible("\x1b[2J\r\n\x00\x7f\t") == "␛[2J␍\n␀␡␉"
    assert visible("\u202e\ud800\u2028\x9b") == "⟨U+202E⟩⟨U+D800⟩⟨U+2028⟩⟨U+009B⟩"
    assert visible("Größe 👍 שלום") == "Größe 👍 שלום"


def test_texts_of_tokens_add_up_to_the_text(tokenizer):
    text = "<|user|>take the mug 1 from größe 👍🏽\n\n  two blanks<|end|>"
    ids = tokenizer.encode(text)
    texts = TokenTexts(tokenizer).texts(ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids)
    thumb = texts.index("👍")
    assert texts[thumb + 1 : thumb + 4] == ["", "", ""]
    # Half of a character, and ids outside the vocabulary.
    assert "\N{REPLACEMENT CHARACTER}" in "".join(TokenTexts(tokenizer).texts(ids[: ids.index(ids[thumb]) + 2]))
    assert TokenTexts(tokenizer).texts([len(tokenizer), -1]) == [f"⟨id {len(tokenizer)}⟩", "⟨id -1⟩"]


def trained(gap, advantage=1.0, weight=1.0):
    return RecordedTurn(None, "", advantage, 0.1, weight, gap)


def disagreement(turns, success):
    return RecordedTrajectory(1, 1, 0, Trajectory("t", "f", 0, success=success), turns).disagreement


def test_disagreement_is_the_weighted_gap_against_the_outcome():
    turns = [trained([0.2, -0.1], weight=0.5), trained([-0.3], weight=2.0), RecordedTurn(None)]
    assert disagreement(turns, success=True) == pytest.approx((0.5 * 0.1 + 2.0 * 0.3) / 3)
    failed = [trained([0.2, -0.1], advantage=-0.5, weight=0.5), trained([-0.3], advantage=-0.5, weight=2.0)]
    assert disagreement(failed, success=False) == pytest.approx(0.5 * 0.2 / 3)
    assert disagreement([RecordedTurn(None), trained(None)], success=True) is None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tokenizer):
    folder = make_run(tmp_path_factory.mktemp("runs") / "trial", tokenizer, 32)
    save_tokenizer(folder, tokenizer)
    return folder


def test_files_have_the_recorded_values(run_folder, tmp_path, tokenizer):
    opened = open_run(run_folder, "trial")
    written = write_viewer([opened], tmp_path / "viewer")
    assert (written.trajectories, written.notes) == (32, [])
    data = tmp_path / "viewer" / "data"
    about, index = read(data / "about-0.js"), read(data / "index-0.js")
    recorded = [trajectory for iteration in (1, 2) for trajectory in opened.read(iteration)]
    assert [row[1:3] for row in index] == [[trajectory.iteration, trajectory.number] for trajectory in recorded]
    last = recorded[-1]
    block = len(about["blocks"]) - 1
    text, detail = read(data / f"text-{block}.js"), read(data / f"detail-{block}.js")
    offset = 31 - about["blocks"][block]
    turn, row = detail["trajectories"][offset]["turns"][-1], last.turns[-1]
    shown = "".join(detail["lines"][line] for line in turn["tokens"])
    assert shown == tokenizer.decode(last.trajectory.turns[-1].response_ids)
    before, after, evidence = (
        "\n".join(detail["lines"][line] for line in part) for part in (*turn["prompt"], turn["evidence"])
    )
    assert before + after == tokenizer.decode(last.trajectory.turns[-1].prompt_ids)
    assert evidence == tokenizer.decode(row.evidence_ids)
    assert [*turn["gap"], turn["turn_weight"]] == pytest.approx([*row.gap, row.turn_weight], abs=1e-4)
    action = "\n".join(text["lines"][line] for line in text["trajectories"][offset][-1][1])
    assert action == last.trajectory.turns[-1].action


def test_missing_data_are_noted(tmp_path, tokenizer):
    bare = make_run(tmp_path / "bare", tokenizer, 16, iterations=1)
    for file in (bare / "training").rglob("*.parquet"):
        file.unlink()
    opened = open_run(bare, "bare")
    missing = opened.reasons("config", "tokens")
    assert "no complete checkpoint" in missing[0]
    written = write_viewer([opened], tmp_path / "viewer", missing)
    assert "16 of 16 trajectories have no record of training" in written.notes[-1]
    turn = read(tmp_path / "viewer" / "data" / "detail-0.js")["trajectories"][0]["turns"][0]
    assert (turn["prompt"], turn["tokens"], turn["gap"], turn["turn_weight"]) == (None, None, None, None)


def test_unreadable_iteration_is_noted(tmp_path, tokenizer):
    folder = make_run(tmp_path / "cut", tokenizer, 32)
    (file,) = (folder / "trajectories" / "iteration=00002").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:200])
    unfinished = folder / "trajectories" / "iteration=00009"
    unfinished.mkdir()
    (unfinished / ".runner001-x.unfinished").write_bytes(b"PAR1")
    run = open_run(folder, "cut")
    assert run.recorded == [1, 2]
    written = write_viewer([run], tmp_path / "viewer")
    assert written.trajectories == 16
    assert "iteration 2 is not shown" in written.notes[0]
    with pytest.raises(UserInputError, match="iteration 2 is not shown"):
        write_viewer([open_run(folder, "cut", 2)], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_training_records_of_another_run_are_rejected(tmp_path, run_folder):
    shutil.copytree(run_folder, tmp_path / "run")
    (other,) = (tmp_path / "run" / "training" / "iteration=00001").glob("*.parquet")
    table = pq.read_table(other, partitioning=None)
    shorter = table.set_column(
        table.schema.get_field_index("gap"), "gap", [[values[:-1] for values in table["gap"].to_pylist()]]
    )
    rewrite(shorter, other)
    with pytest.raises(UserInputError, match="from another run than"):
        open_run(tmp_path / "run").read(1)


def test_only_a_viewer_is_replaced(run_folder, tmp_path):
    run = open_run(run_folder, "trial", 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(UserInputError, match="not a viewer's folder"):
        write_viewer([run], tmp_path / "mine")
    write_viewer([run], tmp_path / "viewer")
    first = (tmp_path / "viewer" / "index.html").read_text()
    write_viewer([run], tmp_path / "viewer")
    assert first != (tmp_path / "viewer" / "index.html").read_text(), "every page has another nonce"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "viewer"]


def test_non_finite_numbers_are_null(tmp_path):
    ids = np.arange(3, dtype=np.int32)
    values = np.array([np.nan, -np.inf, -1.0], np.float32)
    turn = Turn(ids, ids, values, 1, 2, "seen", "act", True, "done", float("nan"), "stop")
    failed = Trajectory("t", "f", 0, [], ended="failed", error="EngineError: <b>died</b>")
    write_groups(
        tmp_path / "trajectories", 1, [TrajectoryGroup("t", [Trajectory("t", "f", 0, [turn]), failed])], "runner001"
    )
    run = recorded_run(tmp_path, recorded=[1], tokens=None)
    assert write_viewer([run], tmp_path / "viewer").trajectories == 2
    detail = read(tmp_path / "viewer" / "data" / "detail-0.js")
    assert detail["trajectories"][0]["turns"][0]["logprobs"] == [None, None, -1.0]
    assert detail["trajectories"][1]["error"] == "EngineError: <b>died</b>"

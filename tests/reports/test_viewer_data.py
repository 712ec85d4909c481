"""Data of the viewer's page: texts, token texts and numbers, and the files that contain them."""

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from hostile_texts import HOSTILE
from rewritten_parquet import rewrite
from synthetic_run import make_run, recorded_run

from trial_ray.errors import UserInputError
from trial_ray.files import visible
from trial_ray.reports.viewer import script, write_viewer
from trial_ray.rollout.recording import write_groups
from trial_ray.runs.reader import open_run
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn, TokenTexts
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn


def read(path):
    """Read a data file as a browser does: one call whose last argument is a string literal with JSON in it."""
    literal = re.fullmatch(r"viewer\.receive\('\w+',\d+,'(.*)'\);\n", path.read_text(encoding="ascii"))[1]
    assert not re.search(r"(?<!\\)(\\\\)*'", literal), "the literal ends early"
    return json.loads(re.sub(r"\\(.)", r"\1", literal))


def test_text_cannot_leave_its_script_file(tmp_path):
    written = script("text", 0, HOSTILE)
    path = tmp_path / "text-0.js"
    path.write_text(written, encoding="ascii")
    assert "<" not in written
    assert written.count("\n") == 1
    assert read(path) == [*HOSTILE]
    assert visible("".join(HOSTILE)).encode().decode().isprintable()


def test_control_characters_are_visible():
    assert visible("\x1b[2J\r\n\x00\x7f\t") == "␛[2J␍\n␀␡␉"
    assert visible("\u202e\ud800\u2028\x9b") == "⟨U+202E⟩⟨U+D800⟩⟨U+2028⟩⟨U+009B⟩"


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


def test_disagreement_is_the_weighted_gap_against_the_outcome():
    def disagreement(advantage, *turns):
        trained = [RecordedTurn(None, "", advantage, 0.1, weight, gap) for gap, weight in turns]
        return RecordedTrajectory(1, 1, 0, Trajectory("t", "f", 0), [*trained, RecordedTurn(None)]).disagreement

    turns = ([0.2, -0.1], 0.5), ([-0.3], 2.0)
    assert disagreement(1.0, *turns) == pytest.approx((0.5 * 0.1 + 2.0 * 0.3) / 3)
    for advantage in (-0.5, 0.0):
        assert disagreement(advantage, *turns) == pytest.approx(0.5 * 0.2 / 3)
    assert disagreement(1.0, (None, 1.0)) is None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tokenizer):
    return make_run(tmp_path_factory.mktemp("runs") / "trial", tokenizer, 32)


def test_files_have_the_recorded_values(run_folder, tmp_path, tokenizer):
    opened = open_run(run_folder, "trial")
    written = write_viewer([opened], tmp_path / "viewer")
    assert written.trajectories == 32
    assert written.notes == []
    data = tmp_path / "viewer/data"
    recorded = [trajectory for iteration in (1, 2) for trajectory in opened.read(iteration)]
    assert [row[1:3] for row in read(data / "index-0.js")] == [[each.iteration, each.number] for each in recorded]
    starts = read(data / "about-0.js")["blocks"]
    row = recorded[-1].turns[-1]
    text, detail = (read(data / f"{kind}-{len(starts) - 1}.js") for kind in ("text", "detail"))
    offset = 31 - starts[-1]
    turn = detail["trajectories"][offset]["turns"][-1]

    def joined(lines, numbers, separator="\n"):
        return separator.join(lines[number] for number in numbers)

    assert joined(detail["lines"], turn["tokens"], "") == tokenizer.decode(row.turn.response_ids)
    before, after = (joined(detail["lines"], part) for part in turn["prompt"])
    assert before + after == tokenizer.decode(row.turn.prompt_ids)
    assert joined(detail["lines"], turn["evidence"]) == tokenizer.decode(row.evidence_ids)
    assert [*turn["gap"], turn["turn_weight"]] == pytest.approx([*row.gap, row.turn_weight], abs=1e-4)
    assert joined(text["lines"], text["trajectories"][offset][-1][1]) == row.turn.action


def test_unreadable_iteration_is_noted(tmp_path, tokenizer):
    folder = make_run(tmp_path / "cut", tokenizer, 32)
    shutil.rmtree(folder / "checkpoints")
    (file,) = folder.glob("trajectories/iteration=00002/*.parquet")
    file.write_bytes(file.read_bytes()[:200])
    (folder / "trajectories/iteration=00009").mkdir()
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
    (other,) = tmp_path.glob("run/training/iteration=00001/*.parquet")
    table = pq.read_table(other, partitioning=None)
    shorter = [values[:-1] for values in table["gap"].to_pylist()]
    rewrite(table.set_column(table.schema.get_field_index("gap"), "gap", [shorter]), other)
    with pytest.raises(UserInputError, match="from another run than"):
        open_run(tmp_path / "run").read(1)


def test_only_a_viewer_is_replaced(run_folder, tmp_path):
    runs = [open_run(run_folder, "trial", 1)]
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").touch()
    with pytest.raises(UserInputError, match="not a viewer's folder"):
        write_viewer(runs, mine)
    first, second = (write_viewer(runs, tmp_path / "viewer").page.read_text() for _ in range(2))
    assert first != second, "every page has another nonce"
    assert len(list(tmp_path.iterdir())) == 2


def test_non_finite_numbers_are_null(tmp_path):
    ids = np.arange(3, dtype=np.int32)
    values = np.array([np.nan, -np.inf, -1.0], np.float32)
    turn = Turn(ids, ids, values, 1, 2, "seen", "act", True, "done", np.nan, "stop")
    failed = Trajectory("t", "f", 0, [], ended="failed", error="EngineError: <b>died</b>")
    group = TrajectoryGroup("t", [Trajectory("t", "f", 0, [turn]), failed])
    write_groups(tmp_path / "trajectories", 1, [group], "runner001")
    written = write_viewer([recorded_run(tmp_path, recorded=[1], tokens=None)], tmp_path / "viewer")
    assert written.trajectories == 2
    assert "2 of 2 trajectories have no record of training" in written.notes[-1]
    first, second = read(tmp_path / "viewer/data/detail-0.js")["trajectories"]
    assert first["turns"][0]["logprobs"] == [None, None, -1.0]
    assert second["error"] == failed.error

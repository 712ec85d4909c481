"""Training is recorded once a turn, with the numbers of the update, and read by the usual tools."""

import numpy as np
import pytest
from rejections import rejected
from small_learners import build_learner, config_of, update
from snippets import snippets
from synthetic_groups import synthetic_groups

from trial_ray.errors import UserInputError
from trial_ray.learner.recording import UpdateRecord, read_training
from trial_ray.learner.rows import group_turn_rows
from trial_ray.models.layout import score_views
from trial_ray.prompts.teacher_context import add_teacher_contexts
from trial_ray.rollout.recording import read_turns, write_groups
from trial_ray.trajectory import Trajectory


def learner_of(method, model_path, folder, **recording):
    config = config_of(method, model_path, lr=1e-2, minibatch_rows=12, microbatch_rows=6)
    return build_learner(config.recording(training_folder=str(folder), **recording))


@pytest.fixture(scope="module")
def groups():
    """Groups whose first rollout failed, so that rollouts are counted with those that are not trained."""
    groups = synthetic_groups()
    failed = Trajectory("task-1", "pick", 9, turns=groups[0].trajectories[0].turns[:1], ended="failed", error="gone")
    groups[1].trajectories.insert(0, failed)
    return groups


@pytest.fixture(scope="module")
def recorded(groups, model_path, tmp_path_factory):
    """Return the folder of a run of one update, its metrics, its rows with the evidence, and both views' scores before it."""
    run = tmp_path_factory.mktemp("run")
    write_groups(run / "trajectories", 3, groups, "runner001")
    UpdateRecord(3, [], {}, 1, "0f-1", "1f-1").write(run / "training")
    learner = learner_of("trial", model_path, run / "training")
    for group in groups:
        add_teacher_contexts(group, learner.config, learner.policy_module.tokenizer)
    rows = group_turn_rows(groups, learner.config)
    views = {str(hindsight): rows.sequences(range(len(rows)), hindsight) for hindsight in (False, True)}
    scores = score_views(learner.policy_module.lm, views, max_tokens=10_000)[0].values()
    return run, update(learner, groups, iteration=3), rows, [each.numpy() for each in scores]


def test_every_trained_turn_is_recorded_once_with_the_updates_numbers(recorded):
    run, metrics, rows, (ordinary, hindsight) = recorded
    frame = read_training(run / "training", iteration=3).to_pandas()
    assert len(frame) == metrics["num_module_steps_trained"] + metrics["rows"]["skipped"]
    survived = read_turns(run / "trajectories").to_pandas().query("ended != 'failed'")
    for key in ("group_id", "rollout_index", "turn_index"):
        assert frame[key].tolist() == survived[key].tolist()
    assert frame.gap.map(len).tolist() == survived.response_ids.map(len).tolist()
    contexts = [turn.teacher_context for turn in rows.turns]
    assert [ids.tolist() for ids in frame.evidence_ids] == [context.ids.tolist() for context in contexts]
    assert frame.evidence_at.tolist() == [context.insert_at for context in contexts]
    np.testing.assert_allclose(np.hstack(frame.learner_logprobs), ordinary, atol=1e-5)
    np.testing.assert_allclose(np.hstack(frame.gap), hindsight - ordinary, atol=2e-5)
    assert np.abs(hindsight - ordinary).max() > 1e-3
    np.testing.assert_allclose(frame.turn_score, [np.abs(gap).mean() for gap in frame.gap], rtol=1e-4)
    assert frame.turn_score.mean() == pytest.approx(float(metrics["trial"]["turn_score_mean"]))
    assert np.std(frame.turn_weight) > 0.01
    assert frame.advantage.tolist() == pytest.approx(rows.advantages.tolist(), rel=1e-5)


def test_updates_up_to_the_limit_are_recorded_without_hindsight_as_nulls(model_path, groups, recorded, tmp_path):
    tokens = len(recorded[2].turn_ids)
    update(learner_of("grpo", model_path, tmp_path, max_recorded_tokens=tokens - 1), groups)
    with pytest.raises(UserInputError, match="max_recorded_tokens"):
        read_training(tmp_path)
    update(learner_of("grpo", model_path, tmp_path, max_recorded_tokens=tokens), groups)
    table = read_training(tmp_path)
    for name in ("gap", "evidence_ids", "evidence_at", "turn_score", "turn_weight"):
        assert table[name].null_count == len(table) > 0, name
    assert table["learner_logprobs"].null_count == table["advantage"].null_count == 0


@pytest.mark.parametrize("library", ["pandas", "datasets", "duckdb"])
def test_the_code_of_the_page_reads_the_records(recorded, library, tmp_path, monkeypatch):
    module = pytest.importorskip(library)
    if library == "datasets":
        monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path)
    (code,) = [code for code in snippets("runs.md", "reading") if code.startswith(f"import {library}")]
    (tmp_path / "run").symlink_to(recorded[0])
    monkeypatch.chdir(tmp_path)
    exec(code, names := {})
    if library == "pandas":
        assert len(names["joined"]) == len(read_training(recorded[0] / "training"))


def test_an_update_record_is_read_back_or_refused(tmp_path):
    record = UpdateRecord(2, ["a", "b"], {"training_iteration": 2, "weight_version": 2}, 1, "0f-1", "1f-1")
    path = record.write(tmp_path)
    assert UpdateRecord.read(tmp_path, 2) == record
    rejected("iteration 3", UpdateRecord.read, tmp_path, 3)
    text = path.read_text()
    version = text.replace('"schema_version": 1', '"schema_version": 9')
    for broken in ("[]", text.replace('"group_ids"', '"groups"'), version):
        path.write_text(broken)
        rejected(None, UpdateRecord.read, tmp_path, 2)

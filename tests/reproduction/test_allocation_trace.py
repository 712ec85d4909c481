"""Allocation traces of a small model: the same numbers as the learner's own preparation, and greedy play."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nano_model import save_nano_model
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import TRIALConfig
from trial_ray.learner.connectors import encode_views
from trial_ray.learner.packing import score_rows
from trial_ray.learner.rows import TurnRows
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.reproduction.artefacts import trace_game, trace_trajectories

GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 4, "max_turns": 4}


@pytest.fixture(scope="module")
def folder(model_path):
    return Path(model_path)


@pytest.fixture(scope="module")
def config(folder):
    config = TRIALConfig().environment("trial/ALFWorld-v0", env_config=GAMES).rl_module(model_path=str(folder))
    return config.env_runners(max_prompt_tokens=400, max_response_tokens=8, prompt_style="plain")


def test_the_trace_is_what_the_method_prepares(folder, config):
    lm, tokenizer = load_causal_lm(str(folder), "float32"), load_tokenizer(str(folder))
    (group,) = synthetic_groups(200, num_groups=1, group_size=3)
    recorded = group.trajectories
    traces = trace_trajectories(lm, tokenizer, recorded, config)
    assert [len(trace.turns) for trace in traces] == [len(each.turns) for each in recorded]
    turns = [turn for trajectory in recorded for turn in trajectory.turns]
    ids = torch.tensor([index for index, each in enumerate(recorded) for _ in each.turns])
    rows = TurnRows(turns, ids, torch.zeros(len(ids)), encode_views(recorded, config, tokenizer))
    rows.logprobs, rows.hindsight_logprobs = score_rows(
        lm, rows.model_rows(range(len(turns)), with_evidence=True), max_tokens=4096
    )
    config.method_class(config).prepare(rows, [], 1)
    assert [turn.weight for trace in traces for turn in trace.turns] == pytest.approx(rows.weights.tolist())
    for trace in traces:
        tokens = sum(turn.tokens for turn in trace.turns)
        assert sum(turn.tokens * turn.weight for turn in trace.turns) / tokens == pytest.approx(1.0, abs=1e-5)


def test_two_policies_play_one_game_greedily(folder, config, tmp_path):
    other = save_nano_model(tmp_path / "other", seed=7)
    (entry,) = config.environment_entries()
    task = entry.tasks()[1]
    first, again, second = (trace_game(model, task, entry, config) for model in (folder, folder, other))
    assert first == again
    assert first.turns != second.turns
    for trace in (first, second):
        assert trace.task_id == task
        assert len(trace.turns) == 4
        assert all(turn.score >= 0 for turn in trace.turns)

"""Allocation traces of a small model: the same numbers as the learner's own preparation, and greedy play."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from nano_model import save_nano_model

from trial_ray.algorithms import TRIALConfig
from trial_ray.learner.connectors import encode_views
from trial_ray.learner.packing import score_rows
from trial_ray.learner.rows import TurnRows
from trial_ray.models.module import load_causal_lm, load_tokenizer
from trial_ray.reports.allocation import trace_game, trace_pair, trace_trajectories
from trial_ray.rollout.trajectory import Trajectory, Turn

GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 4, "max_turns": 4}


@pytest.fixture(scope="module")
def folder(model_path):
    return Path(model_path)


@pytest.fixture(scope="module")
def config(folder):
    config = TRIALConfig().environment("trial/ALFWorld-v0", env_config=GAMES).policy(model_path=str(folder))
    return config.rollouts(max_prompt_tokens=400, max_response_tokens=8, prompt_style="plain")


def trajectories():
    draw = np.random.default_rng(0)

    def turn(index):
        prompt = draw.integers(5, 200, 20).astype(np.int32)
        response = draw.integers(5, 200, 3 + index).astype(np.int32)
        logprobs = np.zeros(len(response), np.float32)
        return Turn(prompt, response, logprobs, 0, 15, "o", "go to shelf 1", True, f"You see {index}.", 0.0, "stop")

    return [Trajectory(f"t{length}", "pick", 0, [turn(i) for i in range(length)], True, 1.0) for length in (4, 1, 3)]


def test_the_trace_is_what_the_method_prepares(folder, config):
    lm, tokenizer = load_causal_lm(str(folder), "float32"), load_tokenizer(str(folder))
    recorded = trajectories()
    traces = trace_trajectories(lm, tokenizer, recorded, config, config.gap_clip)
    assert [len(trace.turns) for trace in traces] == [4, 1, 3]
    turns = [turn for trajectory in recorded for turn in trajectory.turns]
    ids = torch.tensor([0] * 4 + [1] + [2] * 3)
    rows = TurnRows(turns, ids, torch.zeros(8), encode_views(recorded, config, tokenizer))
    rows.logprobs, rows.hindsight_logprobs = score_rows(
        lm, rows.model_rows(range(8), with_evidence=True), max_tokens=4096
    )
    config.method_class(config).prepare(rows, [], 1)
    assert [turn.weight for trace in traces for turn in trace.turns] == pytest.approx(rows.weights.tolist())
    for trace in traces:
        tokens = sum(turn.tokens for turn in trace.turns)
        assert sum(turn.tokens * turn.weight for turn in trace.turns) / tokens == pytest.approx(1.0, abs=1e-5)
    assert trace_trajectories(lm, tokenizer, [], config, config.gap_clip) == []


def test_two_policies_play_one_game_greedily(folder, config, tmp_path):
    other = save_nano_model(tmp_path / "other", seed=7)
    (entry,) = config.environment_entries()
    task = entry.tasks()[1]
    pair = trace_pair({"GRPO": folder, "TRIAL": other}, task, entry, config, config.gap_clip)
    again = trace_game(folder, task, entry, config, config.gap_clip)
    assert pair["GRPO"] == again
    assert pair["GRPO"].turns != pair["TRIAL"].turns
    for trace in pair.values():
        assert trace.task_id == task
        assert len(trace.turns) == 4
        assert all(turn.score >= 0 for turn in trace.turns)

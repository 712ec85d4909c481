"""Tools in training: a policy that calls ALFWorld's tools in Qwen3's format plays and learns with real actors."""

from __future__ import annotations

import json

import pytest
from fitted_model import fit_model, fit_tokenizer
from tiny_run import with_small_actors, with_small_games
from transformers.utils import get_json_schema

from trial_envs.alfworld.tool_env import ALFWorldToolEnv
from trial_envs.tool_env import command_tools
from trial_ray.algorithms import TRIALConfig
from trial_ray.metrics import LEARNER
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.e2e
CALLS = [("look", {}), ("inventory", {}), ("go_to", {"receptacle": "desk 1"}), ("fly", {})]


def said(name: str, arguments: dict[str, str]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>"


def test_an_iteration_with_tools(algorithm_of, tmp_path):
    schemas = [json.dumps(get_json_schema(tool)) for tool in command_tools(ALFWorldToolEnv).values()]
    texts = [said(*call) for call in CALLS]
    tokenizer = fit_tokenizer("qwen3", [*schemas * 5, *texts * 5, ALFWorldToolEnv.__doc__])
    fit_model(tokenizer, texts, steps=150, window=24).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = (
        with_small_games(with_small_actors(TRIALConfig()), max_turns=3, num_tasks=1)
        .rl_module(model_path=str(tmp_path / "model"))
        .training(
            lr=1e-3,
            group_size=3,
            tasks_per_iteration=2,
            minibatch_rows=18,
            microbatch_rows=18,
            ref_kl_coeff=0.0,
            hindsight_start_iteration=1,
        )
        .env_runners(prompt_style="tools", max_prompt_tokens=6000, max_response_tokens=64, seeded_sampling=True)
        .recording(trajectories_folder=str(tmp_path / "trajectories"))
    )
    metrics = flatten(algorithm_of(config).train())
    turns = read_turns(tmp_path / "trajectories")
    actions = turns["action"].to_pylist()
    assert set(actions) <= {"look", "inventory", "go to desk 1", ""}
    assert {"look", "inventory"} & set(actions)
    assert [action != "" for action in actions] == turns["valid"].to_pylist()
    for action, outcome in zip(actions, turns["outcome"].to_pylist(), strict=True):
        assert ("Call exactly one tool in every turn" in outcome) == (action == "")
    assert metrics[f"{LEARNER}engine/logprob_diff"] < 1e-5
    assert metrics[f"{LEARNER}trial/turn_score_mean"] > 0

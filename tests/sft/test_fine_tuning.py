"""Supervised fine-tuning: its loss, its held-out measures, the policy that is kept, and its continuation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_learners import build_learner, config_of
from synthetic_groups import synthetic_groups

from trial_ray.errors import CheckpointError
from trial_ray.models.loading import load_causal_lm
from trial_ray.sft.training import FineTuning, SFTSettings, games_of, split_tasks

SETTINGS = SFTSettings(epochs=2, learning_rate=1e-2, batch_rows=6, checks=3, held_out=0.3)


@pytest.fixture(scope="module")
def episodes(tokenizer):
    texts = ("look", "go to desk 1", "take pencil 1 from desk 1")
    responses = [np.array([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32) for text in texts]
    groups = synthetic_groups(num_groups=8, group_size=1, responses=responses, seed=3)
    return [each for group in groups for each in group.trajectories]


def test_tasks_are_not_shared_with_the_held_out_episodes(episodes):
    training, held_out = split_tasks(episodes, 0.3)
    assert len(training) + len(held_out) == len(episodes)
    assert not {each.task_id for each in training} & {each.task_id for each in held_out}
    assert split_tasks(episodes[:1], 0.3) == (episodes[:1], [])


@pytest.mark.actors
def test_continues_where_it_was_interrupted(ray_session, model_path, episodes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def tune(name, settings=SETTINGS, stop_after=None):
        tuning = FineTuning(config_of("grpo", model_path), settings, episodes, Path(name))

        def on_check(check):
            if check.step == stop_after:
                raise InterruptedError

        tuning.run(lambda step, loss: None, on_check)
        return tuning

    whole = tune("whole")
    with pytest.raises(InterruptedError):
        tune("cut", stop_after=whole._every)
    with pytest.raises(CheckpointError):
        tune("cut", replace(SETTINGS, epochs=3))
    continued = tune("cut")
    assert continued.checks == whole.checks
    assert whole.checks[-1].loss < whole.checks[0].loss
    tuned = []
    for tuning in (whole, continued):
        folder = tuning.finish({})
        assert (folder / "sft.json").is_file()
        assert not folder.with_name(f"{folder.name}.partial").exists()
        tuned.append(load_causal_lm(str(folder), "float32").state_dict())
    torch.testing.assert_close(*tuned, rtol=0, atol=0)


def test_layers_stay_checkpointed_after_games(model_path):
    """transformers checkpoints layers in training mode only, and a model plays in evaluation mode."""
    config = config_of("grpo", model_path, gradient_checkpointing=True).env_runners(prompt_style="plain")
    config.evaluation(evaluation_split="generated", evaluation_env_config={"num_games": 1, "max_turns": 2})
    learner = build_learner(config)

    def checkpointed():
        return [module for module in learner.policy_module.lm.modules() if module.training]

    before = checkpointed()
    games_of(config, 1)(learner)
    assert checkpointed() == before != []

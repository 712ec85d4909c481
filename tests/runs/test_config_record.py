"""A resolved config as JSON: what of an environment it holds, and that a run with an adapter needs the adapter again."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from riddle_env import Curt, RiddleEnv
from user_env import registered

from trial_ray.adapters import EnvironmentAdapter
from trial_ray.algorithms.methods import new_config
from trial_ray.errors import CheckpointError
from trial_ray.runs.config_record import (
    command_of,
    commands_in_force,
    from_record,
    load_record,
    to_record,
    with_command,
)
from trial_ray.runs.folder import RunFolder

ENV_ID = RiddleEnv.ENV_ID


def own(**fields) -> EnvironmentAdapter:
    return EnvironmentAdapter(ENV_ID, templates={"plain": Curt()}, skills={"": "think first"}, success=1.0, **fields)


@pytest.fixture(autouse=True)
def environment():
    with registered(RiddleEnv):
        yield


def recorded(*arguments, method="sdar", **environment):
    config = new_config(method).environment(*arguments, **environment).rl_module(model_path="some/model")
    return signed(config.training(lr=0.5))


def signed(config):
    """What ``resolved_config.json`` of a run of this user's holds."""
    return json.loads(json.dumps(with_command(None, to_record(config), again=False)))


def test_a_run_with_an_adapter_of_the_users_needs_it_again():
    record = recorded(ENV_ID, adapter=own(task="guess"))
    (environment,) = record["environments"]
    assert environment["adapter"]["skills"] == {"": "think first"}
    assert environment["adapter"]["templates"]["plain"].startswith("Curt ")
    with pytest.raises(CheckpointError, match=rf"played {ENV_ID} with its own adapter.*--env-adapter FILE.py"):
        from_record(record)
    with pytest.raises(CheckpointError, match=f"adapter of {ENV_ID} is not the run's: task, max_turns differ"):
        from_record(record, [own(max_turns=3)])
    given = own(task="guess")
    config = from_record(record, [given])
    assert config.adapters == (given,)
    config.validate()


def test_a_function_of_the_adapters_is_known_by_its_name():
    record = recorded(ENV_ID, adapter=own(score=partial(max, 0)))
    assert from_record(record, [own(score=partial(max, 0))]).adapters
    with pytest.raises(CheckpointError, match="score differ"):
        from_record(record, [own()])


def test_a_mixture_is_read_as_it_was():
    environments = [(ENV_ID, {"words": ["red"]}, 3.0), ("trial/TextWorld-v0", {}, 1.0)]
    record = recorded(environments=environments, method="grpo")
    assert [found["weight"] for found in record["environments"]] == [3.0, 1.0]
    config = from_record(record)
    assert [(entry.env_id, entry.config, entry.weight) for entry in config.environment_entries()] == environments
    config.validate()


def test_a_run_keeps_the_day_on_which_it_began(tmp_path):
    def config(day=None):
        made = new_config("grpo").environment("trial/ALFWorld-v0", env_config={"split": "generated"})
        return made.rl_module(model_path="some/model", chat_template_date=day)

    (tmp_path / "experiment.py").touch()
    began = config()
    folder = RunFolder.create(tmp_path / "run", began, tmp_path / "experiment.py", [])
    assert load_record(folder.path / "resolved_config.json").chat_template_date == began.chat_template_date is not None
    folder = RunFolder.create(tmp_path / "other", config("2020-02-29"), tmp_path / "experiment.py", [])
    for given, day in ((None, "2020-02-29"), ("2020-03-01", "2020-03-01")):
        folder.fix_date(resumed := config(given))
        assert resumed.chat_template_date == day


def test_a_bound_that_is_switched_off_is_read_back():
    config = new_config("trial").environment("trial/ALFWorld-v0").training(clamp_alpha=math.inf, gap_clip=math.inf)
    read = from_record(json.loads(json.dumps(to_record(config), allow_nan=False)))
    assert (read.clamp_alpha, read.gap_clip) == (math.inf, math.inf)


def test_a_keyword_that_json_cannot_hold_is_shown():
    record = recorded("trial/ALFWorld-v0", env_config={"split": "train", "data": object()})
    assert "object" in record["environments"][0]["config"]["data"]
    assert record["settings"]["env_config"] == {"split": "train", "data": None}
    with pytest.raises(CheckpointError, match=r"has env_config\.data only as the text '<object .*trial-ray export"):
        from_record(record)


def test_paths_and_numpys_numbers_are_read_back_as_plain_values():
    config = new_config("trial").environment("trial/ALFWorld-v0", env_config={"data": Path("x"), "n": np.int64(3)})
    config.training(lr=np.float64(0.5)).debugging(seed=np.int64(3))
    read = from_record(signed(config))
    assert (read.lr, read.seed, read.env_config) == (0.5, 3, {"data": "x", "n": 3})


def test_of_a_record_that_this_user_did_not_sign_nothing_is_read_that_could_name_code_or_files(caplog):
    named = {"split": "generated", "max_turns": 3, "data": "/theirs", "game_args": {"seed": 1, "load": "theirs"}}
    dangerous = {
        "env": "their_module:trial/ALFWorld-v0",
        "env_config": named,
        "environments": [["their_module:trial/ALFWorld-v0", named, 1.0]],
        "warm_start": {"env": "their_module:trial/ALFWorld-v0", "env_config": named, "size": "nano"},
        "engine_kwargs": {"dtype": "float32", "trust_remote_code": True, "scheduler_cls": "theirs.Scheduler"},
        "extra_python_environs_for_driver": {"LD_PRELOAD": "/theirs.so"},
        "callbacks_on_episode_end": ["theirs"],
        "trajectories_folder": "/theirs",
    }
    config = new_config("trial").environment("trial/ALFWorld-v0").training(lr=0.5)
    record = signed(config)
    record["settings"] |= dangerous
    with caplog.at_level("WARNING"):
        read = from_record(record, source="RUN")
    data = {"split": "generated", "max_turns": 3, "game_args": {"seed": 1}}
    assert (read.lr, read.env, read.env_config) == (0.5, "trial/ALFWorld-v0", data)
    assert list(read.environments) == [["trial/ALFWorld-v0", data, 1.0]]
    assert read.warm_start == {"env": "trial/ALFWorld-v0", "env_config": data, "size": "nano"}
    assert read.engine_kwargs == {"dtype": "float32"}
    assert (read.extra_python_environs_for_driver, read.callbacks_on_episode_end) == ({}, None)
    assert read.trajectories_folder is None
    assert "RUN was not written by this user on this machine" in caplog.text
    own = signed(config.environment(env_config={"data": "/mine"}))
    assert from_record(own).env_config == {"data": "/mine"}


def test_a_command_that_continues_somebody_elses_run_does_not_vouch_for_their_settings():
    config = new_config("trial").environment("trial/ALFWorld-v0", env_config={"data": "/theirs"})
    theirs = to_record(config)
    mine = json.loads(json.dumps(with_command(theirs, {**to_record(config), "after_iteration": 3}, again=False)))
    assert [from_record(command_of(commands_in_force(mine), number)).env_config for number in (3, 4)] == [
        {},
        {"data": "/theirs"},
    ]

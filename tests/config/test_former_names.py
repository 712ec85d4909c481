"""Names of earlier versions: config methods that are refused, and settings in records and on command lines."""

from __future__ import annotations

import pytest

from trial_ray import TRIALConfig
from trial_ray.errors import ConfigError, UnsupportedError
from trial_ray.runs.config_record import from_record, setting_changes, to_record
from trial_ray.runs.overrides import apply_overrides


def base() -> TRIALConfig:
    return TRIALConfig().environment("trial/ALFWorld-v0", env_config={"split": "train"})


@pytest.mark.parametrize(
    ("former", "now"),
    {"policy": "rl_module", "rollouts": "env_runners", "recovery": "fault_tolerance", "panel": "evaluation"}.items(),
)
def test_a_method_by_its_former_name_is_refused_with_the_new_one(former, now):
    with pytest.raises(UnsupportedError, match=rf"{former}\(\) is not supported: it is {now}\(\) now"):
        getattr(base(), former)(split="valid_seen")


def test_the_new_names_take_rllibs_keywords_too():
    config = base().env_runners(num_env_runners=3, max_prompt_tokens=99).evaluation(evaluation_interval=2)
    assert (config.num_env_runners, config.max_prompt_tokens, config.evaluation_interval) == (3, 99, 2)


def test_a_keyword_without_its_prefix_and_rllibs_number_of_episodes_are_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"no setting 'split'\. Did you mean 'evaluation_split'"):
        base().evaluation(split="valid_seen")
    with pytest.raises(
        ConfigError, match="RLlib's evaluation_duration is 5, but has no effect here: set evaluation_num_tasks"
    ):
        base().rl_module(model_path="m").evaluation(evaluation_duration=5).validate()


def test_settings_by_former_names_are_read_from_records_and_command_lines():
    config = apply_overrides(base(), ["panel_num_tasks=5", "panel_env_config.num_games=2"])
    assert (config.evaluation_num_tasks, config.evaluation_env_config) == (5, {"num_games": 2})
    now = to_record(config)
    names = {name: name.replace("evaluation_", "panel_") for name in now["settings"] if name.endswith("num_tasks")}
    assert names
    former = now | {"settings": {names.get(name, name): value for name, value in now["settings"].items()}}
    assert from_record(former).evaluation_num_tasks == 5
    assert not setting_changes([former, now])

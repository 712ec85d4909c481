"""Names of earlier versions: config methods, settings, metrics and options; those of this version with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trial_ray import TRIALConfig
from trial_ray.cli import build_parser
from trial_ray.config.declare import setting
from trial_ray.errors import ConfigError, UnsupportedError
from trial_ray.metrics import LEARNER
from trial_ray.runs.config_record import from_record, setting_changes, to_record
from trial_ray.runs.metric_files import read_metrics
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


def test_a_keyword_without_its_prefix_and_rllibs_number_of_episodes_are_refused_with_what_to_write():
    with pytest.raises(ConfigError, match=r"no setting 'split'\. Did you mean 'evaluation_split'"):
        base().evaluation(split="valid_seen")
    with pytest.raises(
        ConfigError, match="RLlib's evaluation_duration is 5, but has no effect here: set evaluation_num_tasks"
    ):
        base().rl_module(model_path="m").evaluation(evaluation_duration=5).validate()


def test_settings_by_former_names_are_read_from_records_and_command_lines():
    with pytest.warns(FutureWarning, match="panel_num_tasks is evaluation_num_tasks now"):
        config = apply_overrides(base(), ["panel_num_tasks=5", "panel_env_config.num_games=2"])
    assert (config.evaluation_num_tasks, config.evaluation_env_config) == (5, {"num_games": 2})
    now = to_record(config)
    names = {name: name.replace("evaluation_", "panel_") for name in now["settings"] if name.endswith("num_tasks")}
    assert names
    former = now | {"settings": {names.get(name, name): value for name, value in now["settings"].items()}}
    assert from_record(former).evaluation_num_tasks == 5
    assert not setting_changes([former, now])


@pytest.mark.parametrize(
    ("former", "now", "value"),
    [
        ("kl_coeff", "ref_kl_coeff", 0.5),
        ("privileged_view", "teacher_context", "peer"),
        ("max_logprob_gap", "max_logprob_diff", 3.0),
    ],
)
def test_a_setting_is_taken_by_its_former_name_with_a_warning(former, now, value):
    for give in (lambda config: config.training(**{former: value}), lambda config: setattr(config, former, value)):
        config = base()
        with pytest.warns(FutureWarning, match=f"{former} is {now} now"):
            give(config)
        assert getattr(config, now) == value
        assert not hasattr(config, former)
    with pytest.raises(ConfigError, match=f"{former} has an earlier name: write {now}"):
        type("Own", (TRIALConfig,), {"__annotations__": {former: float}, former: setting(value)})


def test_the_section_of_health_checks_is_taken_by_its_former_name():
    with pytest.warns(FutureWarning, match=r"\.guards\(\) is \.health_checks\(\) now"):
        config = base().guards(max_kl=3.0)
    assert config.max_kl == 3.0


def test_metrics_are_read_by_former_names(tmp_path):
    file = tmp_path / "metrics.jsonl"
    line = {"iteration": 1, "guards/num_violated": 2, "learners/default_policy/engine/logprob_gap_max": 0.5}
    file.write_text(json.dumps(line) + "\n")
    expected = {"iteration": 1, "health_checks/num_failed": 2, f"{LEARNER}engine/logprob_diff_max": 0.5}
    assert read_metrics(file) == ([expected], 0)


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["report", "run", "--output", "page.html"], "out", Path("page.html")),
        (["evaluate", "--games", "3"], "max_concurrency", 3),
    ],
)
def test_an_option_is_taken_by_its_former_name_with_a_warning(capsys, words, dest, value):
    args = build_parser().parse_args(words)
    assert getattr(args, dest) == value
    assert f"warning: {words[-2]} is --{dest.replace('_', '-')} now" in capsys.readouterr().out

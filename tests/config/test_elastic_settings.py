"""Numbers of engines and env runners are fixed, or the fewest and the most, in every way that a setting is given."""

from __future__ import annotations

import json

import pytest

from trial_ray.algorithms import TRIAL, TRIALConfig
from trial_ray.config.sampling import actor_range
from trial_ray.errors import ConfigError
from trial_ray.planning.memory import PlanRequest
from trial_ray.runs.config_record import from_record, to_record
from trial_ray.runs.overrides import apply_overrides


def config_of(**engines) -> TRIALConfig:
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="anything")
    return config.engines(**engines)


def elastic() -> TRIALConfig:
    return config_of(num_engines=(1, 4)).env_runners(num_env_runners=(2, 8))


def numbers(config) -> list[tuple[int, int]]:
    return [actor_range(config.num_engines), actor_range(config.num_env_runners)]


def test_a_number_is_both_limits():
    assert numbers(config_of(num_engines=3)) == [(3, 3), (1, 1)]
    assert numbers(elastic()) == [(1, 4), (2, 8)]
    elastic().validate()


def test_command_lines_and_records_hold_both_limits():
    written = ["num_engines=(1, 4)", "num_env_runners=[2, 8]"]
    assert numbers(apply_overrides(config_of(num_engines=2), written)) == [(1, 4), (2, 8)]
    assert numbers(apply_overrides(elastic(), ["num_engines=2", "num_env_runners=0"])) == [(2, 2), (0, 0)]
    recorded = json.loads(json.dumps(to_record(elastic())))
    assert to_record(from_record(recorded)) == recorded
    found = from_record(recorded)
    found.validate()
    assert numbers(found) == [(1, 4), (2, 8)]


@pytest.mark.parametrize("pair", [(4, 1), (0, 2), (1, 2, 3), (1, 2.5), (1, True)])
def test_pairs_that_are_no_range_are_refused(pair):
    for name in ("num_engines", "num_env_runners"):
        config = elastic()
        setattr(config, name, pair)
        with pytest.raises(ConfigError, match=name):
            config.validate()


def test_a_trial_reserves_the_fewest_and_a_plan_is_for_the_most(model_path):
    main, *actors = TRIAL.default_resource_request(elastic()).bundles
    assert main
    assert len(actors) == 3
    request = PlanRequest.of(elastic().rl_module(model_path=model_path))
    assert (request.num_engines, request.num_env_runners) == (4, 8)


def test_engines_that_share_devices_with_learners_are_a_fixed_number():
    config = config_of(engine="transformers", num_engines=(1, 2), colocate=True).learners(num_learners=2)
    with pytest.raises(ConfigError, match=r"num_engines=\(1, 2\) and 2 learners"):
        config.validate()

"""Numbers of engines and env runners: fixed or a range, in configs, on command lines and in records."""

from __future__ import annotations

import json

import pytest

from trial_ray.algorithms import TRIAL, TRIALConfig
from trial_ray.config.sampling import actor_range
from trial_ray.errors import ConfigError
from trial_ray.planning.memory import PlanRequest
from trial_ray.runs.config_record import from_record, to_record
from trial_ray.runs.experiment import apply_overrides


def config_of(**engines) -> TRIALConfig:
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="anything")
    return config.engines(**engines)


def elastic() -> TRIALConfig:
    return config_of(num_engines=(1, 4)).env_runners(num_env_runners=(2, 8))


def numbers(config) -> list[tuple[int, int]]:
    return [actor_range(config.num_engines), actor_range(config.num_env_runners)]


def test_number_is_both_limits():
    assert numbers(config_of(num_engines=3)) == [(3, 3), (1, 1)]
    assert numbers(elastic()) == [(1, 4), (2, 8)]
    elastic().validate()


def test_command_lines_and_records_have_both_limits():
    written = ["num_engines=(1, 4)", "num_env_runners=[2, 8]"]
    assert numbers(apply_overrides(config_of(num_engines=2), written)) == [(1, 4), (2, 8)]
    assert numbers(apply_overrides(elastic(), ["num_engines=2", "num_env_runners=0"])) == [(2, 2), (0, 0)]
    recorded = json.loads(json.dumps(to_record(elastic())))
    assert to_record(from_record(recorded)) == recorded
    config = from_record(recorded)
    config.validate()
    assert numbers(config) == [(1, 4), (2, 8)]


@pytest.mark.parametrize("pair", [(4, 1), (0, 2), (1, 2, 3), (1, 2.5), (1, True)])
def test_pair_that_is_not_a_range_is_refused(pair):
    for name in ("num_engines", "num_env_runners"):
        config = elastic()
        setattr(config, name, pair)
        with pytest.raises(ConfigError, match=name):
            config.validate()


def test_trial_reserves_the_minimum_and_plan_the_maximum(model_path):
    main, *actors = TRIAL.default_resource_request(elastic()).bundles
    assert main
    assert len(actors) == 3
    request = PlanRequest.of(elastic().rl_module(model_path=model_path))
    assert (request.num_engines, request.num_env_runners) == (4, 8)


def test_number_of_colocated_engines_is_fixed():
    config = config_of(engine="transformers", num_engines=(1, 2), colocate=True).learners(num_learners=2)
    with pytest.raises(ConfigError, match="num_engines"):
        config.validate()

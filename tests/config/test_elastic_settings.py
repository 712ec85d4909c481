"""Numbers of engines and env runners: fixed or a range, in configs, on command lines and in records."""

import json

import pytest
from rejections import misconfigured
from small_learners import config_of

from trial_ray import TRIAL
from trial_ray.config.sampling import actor_range
from trial_ray.planning.memory import PlanRequest
from trial_ray.runs.config_record import from_record, to_record
from trial_ray.runs.experiment import apply_overrides


def elastic(model_path="anything"):
    return config_of("trial", model_path).engines(num_engines=(1, 4)).env_runners(num_env_runners=(2, 8))


def numbers(config):
    return [actor_range(config.num_engines), actor_range(config.num_env_runners)]


def test_command_lines_and_records_have_both_limits(model_path):
    assert numbers(apply_overrides(elastic(), ["num_engines=2", "num_env_runners=0"])) == [(2, 2), (0, 0)]
    written = apply_overrides(elastic(model_path), ["num_engines=(1, 5)", "num_env_runners=[2, 7]"])
    recorded = json.loads(json.dumps(to_record(written)))
    assert to_record(from_record(recorded)) == recorded
    config = from_record(recorded)
    config.validate()
    assert numbers(config) == [(1, 5), (2, 7)]
    # Tune reserves the minimum, and the plan is for the maximum.
    assert len(TRIAL.default_resource_request(config).bundles) == 1 + 1 + 2
    request = PlanRequest.of(config)
    assert request.num_engines == 5
    assert request.num_env_runners == 7


@pytest.mark.parametrize("pair", [(4, 1), (0, 2), (1, 2, 3), (1, 2.5), (1, True)])
def test_pair_that_is_not_a_range_is_refused(pair):
    for name in ("num_engines", "num_env_runners"):
        config = elastic()
        setattr(config, name, pair)
        misconfigured(name, config.validate)


def test_number_of_colocated_engines_is_fixed():
    config = elastic().engines(engine="transformers", colocate=True).learners(num_learners=4)
    misconfigured("num_engines", config.validate)

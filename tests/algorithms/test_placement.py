"""Bundles of actors: what a trial reserves, engines that share a device with a learner, and what the cluster must have."""

import pytest
import ray
from ray.util import placement_group_table
from small_learners import config_of
from tiny_run import with_small_actors

from trial_ray import TRIAL
from trial_ray.algorithms.placement import (
    create_engines,
    first_engine_bundle,
    require_resources,
    reserve_pairs,
    with_fewer_learners,
)
from trial_ray.errors import ConfigError, InfrastructureError


def colocated_config(num_learners, num_engines=1):
    config = with_small_actors(config_of("trial", "anything")).engines(colocate=True, num_engines=num_engines)
    return config.learners(num_learners=num_learners, num_cpus_per_learner=0.5)


def test_engines_are_part_of_a_trials_resources():
    config = colocated_config(num_learners=0).engines(
        colocate=False, num_engines=2, num_gpus_per_engine=1, num_cpus_per_engine=3, custom_resources_per_engine={"big": 0.5}
    )  # fmt: skip
    bundles = TRIAL.default_resource_request(config.env_runners(num_env_runners=4)).bundles
    assert len(bundles) == 1 + 4 + 2
    assert bundles[-2:] == [{"CPU": 3, "GPU": 1, "big": 0.5}] * 2


def test_bundles_hold_an_engine_and_its_learner():
    config = colocated_config(num_learners=2, num_engines=2)
    main, runner, *pairs = TRIAL.default_resource_request(config).bundles
    assert pairs == [{"CPU": 0.75}] * 2
    assert (main["CPU"], runner["CPU"]) == (0.25, 0.25)
    assert first_engine_bundle([main, runner, *pairs], config) == 2
    shared = config.engines(num_gpus_per_engine=0.4).learners(num_gpus_per_learner=0.6)
    assert TRIAL.default_resource_request(shared).bundles[2:] == [{"CPU": 0.75, "GPU": 1.0}] * 2


def test_a_learner_inside_the_main_process_shares_its_bundle():
    config = colocated_config(num_learners=0)
    main, runner = TRIAL.default_resource_request(config).bundles
    assert (main["CPU"], runner["CPU"]) == (0.75, 0.25)
    assert first_engine_bundle([main, runner], config) == 0
    assert reserve_pairs([main, runner], config) is None
    with pytest.raises(ConfigError, match=r"colocate in a sweep needs learners of their own: set \.learners"):
        create_engines(config, group=None, bundles=[{}])


@pytest.mark.actors
def test_what_fits_passes_and_is_not_kept(ray_session):
    for bundles in ([{"CPU": 1.0, "GPU": 0}, {"CPU": 0.0}, {"CPU": 0.5}], [], [{"CPU": 0, "GPU": 0.0}, {}]):
        require_resources(bundles, timeout_s=30)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.actors
def test_what_does_not_fit_is_told_with_what_there_is(ray_session):
    there = ray.cluster_resources()["CPU"]
    with pytest.raises(
        InfrastructureError, match=rf"CPU: 1000\.5 requested in bundles of up to 1000, {there:g} in the"
    ):
        require_resources([{"CPU": 1000.0}, {"CPU": 0.5}], timeout_s=1)


@pytest.mark.long
@pytest.mark.actors
def test_of_learners_as_many_stay_as_there_is_room_for(ray_session):
    """What is free holds an env runner, an engine and three learners."""
    share = ray.available_resources()["CPU"] / 5.05
    config = colocated_config(num_learners=8).engines(colocate=False, num_cpus_per_engine=share)
    config.env_runners(num_cpus_per_env_runner=share).learners(num_cpus_per_learner=share)
    assert with_fewer_learners(config).num_learners == 3
    assert config.num_learners == 8
    assert with_fewer_learners(config.learners(num_cpus_per_learner=100)) is None
    sharded = config.learners(num_cpus_per_learner=share).rl_module(sharding="fsdp", fsdp_size=2)
    assert with_fewer_learners(sharded).num_learners == 2

"""Bundles in which an engine and its learner share a device."""

from __future__ import annotations

from trial_ray.algorithms import TRIAL, TRIALConfig
from trial_ray.algorithms import placement as colocation


def colocated_config(num_learners: int, num_engines: int = 1) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path="anything")
        .engines(engine="transformers", colocate=True, num_engines=num_engines, num_cpus_per_engine=0.25)
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
        .learners(num_learners=num_learners, num_cpus_per_learner=0.5)
        .resources(num_cpus_for_main_process=0.25)
    )


def test_bundles_hold_an_engine_and_its_learner():
    config = colocated_config(num_learners=2, num_engines=2)
    main, runner, *pairs = TRIAL.default_resource_request(config).bundles
    assert pairs == [{"CPU": 0.75}] * 2
    assert (main["CPU"], runner["CPU"]) == (0.25, 0.25)
    assert colocation.first_engine_bundle([main, runner, *pairs], config) == 2
    shared = config.engines(num_gpus_per_engine=0.4).learners(num_gpus_per_learner=0.6)
    assert TRIAL.default_resource_request(shared).bundles[2:] == [{"CPU": 0.75, "GPU": 1.0}] * 2


def test_a_learner_inside_the_main_process_shares_its_bundle():
    config = colocated_config(num_learners=0)
    main, runner = TRIAL.default_resource_request(config).bundles
    assert (main["CPU"], runner["CPU"]) == (0.75, 0.25)
    assert colocation.first_engine_bundle([main, runner], config) == 0
    assert colocation.reserve_pairs([main, runner], config) is None

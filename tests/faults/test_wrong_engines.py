"""Real engines that answer wrongly or die while they take weights: what is trained on is always what was sampled."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from fault_table import lost_rows
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray.engines import pool as pool_module
from trial_ray.engines.transformers import TransformersEngine
from trial_ray.engines.weights import iter_weights
from trial_ray.errors import InfrastructureError
from trial_ray.rollout.recording import read_turns

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


def faulty_engine(orders: Path) -> type:
    """An engine that looks into a folder for what it shall do wrongly."""

    class FaultyEngine(TransformersEngine):
        async def exchange(self, client, requests):
            message = await super().exchange(client, requests)
            answers = pickle.loads(message)
            lies = [each.name for each in orders.iterdir() if each.name.startswith("lie")]
            self.answered = getattr(self, "answered", 0) + bool(answers)
            if not lies or not answers or (lies == ["lie_now_and_then"] and self.answered % 4):
                return message
            return pickle.dumps(
                [
                    (number, replace(answer, logprobs=np.full_like(answer.logprobs, np.nan)))
                    for number, answer in answers
                ]
            )

        def _replace_weights(self, weights):
            if (orders / "die_before_loading").exists():
                (orders / "die_before_loading").unlink()
                os._exit(1)
            if (orders / "die_halfway").exists():
                (orders / "die_halfway").unlink()
                name, tensor = next(iter(iter_weights(weights)))
                dict(self._model.named_parameters())[name].data.copy_(tensor)
                os._exit(1)
            return super()._replace_weights(weights)

    return FaultyEngine


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("orders")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trajectories")


@pytest.fixture(scope="module")
def algo(ray_session, orders, recorded, model_path):
    with registered(ChanceEnv), pytest.MonkeyPatch.context() as patch:
        made = faulty_engine(orders)
        patch.setattr(pool_module, "engine_class", lambda name: made)
        config = config_of(model_path).recording(trajectories_folder=str(recorded))
        algo = config.env_runners(max_group_redraws=4, request_timeout_s=60).build_algo()
        yield algo
        algo.stop()


def timed(algo) -> tuple[dict, float]:
    """The result of an iteration, and its seconds."""
    began = time.monotonic()
    return algo.train(), time.monotonic() - began


def versions(algo) -> list[int]:
    return ray.get([engine.weight_version.remote() for engine in algo.engine_pool.handles], timeout=60)


def test_an_engine_that_lies_now_and_then_costs_rollouts_and_spoils_none(algo, orders, recorded, tell):
    (orders / "lie_now_and_then").touch()
    result, seconds = timed(algo)
    (orders / "lie_now_and_then").unlink()
    rows = result["rows"]
    assert result["env_runners"]["num_failed_episodes"] > 0
    assert result["learners"]["default_policy"]["num_module_steps_trained"] == rows["given_to_learners"] > 0
    turns = read_turns(recorded, 1)
    assert np.isfinite(turns["logprobs"].combine_chunks().flatten().to_numpy(zero_copy_only=False)).all()
    tell(
        "log-probabilities of NaN in every 4th answer", "sampling", "rollouts fail; goes on", seconds, lost_rows(result)
    )


@pytest.mark.parametrize("moment", ["die_before_loading", "die_halfway"])
def test_an_engine_that_dies_while_it_takes_weights_is_replaced_and_given_them(algo, orders, moment, tell):
    before = algo.engine_pool.replacements
    (orders / moment).touch()
    result, seconds = timed(algo)
    assert algo.engine_pool.replacements == before + 1
    assert versions(algo) == [algo.weight_version]
    assert algo.train()["env_runners"]["num_failed_episodes"] == 0
    tell("the engine dies", f"sending of weights, {moment}", "replaced; goes on", seconds, lost_rows(result))


def test_an_engine_that_only_lies_ends_the_iteration_with_its_reason(algo, orders, tell):
    trained, began = algo.iteration, time.monotonic()
    (orders / "lie").touch()
    with pytest.raises(InfrastructureError, match=r"No group of rollouts survived.*log-probability of nan.*lower lr"):
        algo.train()
    assert algo.iteration == trained
    tell("log-probabilities of NaN in every answer", "sampling", "typed error", time.monotonic() - began)

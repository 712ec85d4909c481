"""Faults of somebody's environment on real env runners: the others go on, and a run that must stop says why."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from faulty_env import CountingEnv
from tiny_run import with_small_actors
from user_env import registered

from trial_ray.algorithms.config import GRPOConfig

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(scope="module", autouse=True)
def environment(ray_session):
    with registered(CountingEnv):
        yield


def config_of(model_path: str, **env_config) -> GRPOConfig:
    return (
        with_small_actors(GRPOConfig())
        .environment(CountingEnv.ENV_ID, env_config={"split": "train", **env_config})
        .rl_module(model_path=model_path)
        .training(lr=1e-3, group_size=4, tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, kl_coeff=0.0)
        .env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", max_group_redraws=1)
        .engines(engine_kwargs={"max_model_len": 508})
        .evaluation(evaluation_split="train", evaluation_num_tasks=2)
    )


def test_one_faulty_episode_of_eight_is_left_out_and_told_while_the_others_train(
    algorithm_of, model_path, caplog, tmp_path
):
    algo = algorithm_of(config_of(model_path, orders=str(tmp_path / "orders")))
    (tmp_path / "orders").write_text("step_raises")
    with caplog.at_level(logging.WARNING):
        result = algo.train()
    assert result["groups"]["num_trained"] == 2
    assert result["env_runners"]["num_failed_episodes"] == 1
    assert result["env_runners"]["num_episodes"] == 7
    assert np.isfinite(result["learners"]["default_policy"]["grpo"]["surrogate_loss"])
    assert "1 of 8 rollouts failed" in caplog.text
    assert "turn 2: KeyError: 'position'" in caplog.text
    # The instance that failed is closed and never played again; the others are kept.
    (kept,) = algo.env_runner_group.foreach_env_runner(
        lambda runner: [env._env.unwrapped.closed for envs in runner._free_envs.values() for env in envs],
        local_env_runner=False,
    )
    assert kept == [False] * 7
    assert algo.train()["env_runners"]["num_episodes"] == 8


def test_an_episode_of_the_panel_is_played_again_and_a_bug_in_a_runner_is_named(
    algorithm_of, model_path, caplog, tmp_path
):
    def spoil(runner) -> None:
        def player(request, settings, seed):
            raise ZeroDivisionError("a bug of ours")

        runner.player = player

    def restore(runner) -> None:
        del runner.player

    algo = algorithm_of(config_of(model_path, orders=str(tmp_path / "orders")))
    (tmp_path / "orders").write_text("step_raises")
    with caplog.at_level(logging.WARNING):
        (result,) = algo.evaluate_panels().values()
    assert [episode.ended for episode in result.episodes] == ["terminated"] * 2
    assert "1 of 2 episodes failed" in caplog.text
    algo.env_runner_group.foreach_env_runner(spoil, local_env_runner=False)
    with pytest.raises(ZeroDivisionError, match="a bug of ours"):
        algo.train()
    algo.env_runner_group.foreach_env_runner(restore, local_env_runner=False)

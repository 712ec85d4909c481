"""Evaluation without a learner: episodes do not depend on the number of env runners and engines."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import ray
from tiny_run import with_small_actors

from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.evaluation.evaluation_sets import EvaluationSet, choose_evaluation_set
from trial_ray.evaluation.player import EvaluationPlayer, Evaluator, policy_protocol

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]
TASKS = 8


def config_of(model_path: str, runners: int = 1, engines: int = 1) -> GRPOConfig:
    config = (
        with_small_actors(GRPOConfig())
        .environment(
            "trial/ALFWorld-v0",
            env_config={"split": "generated", "difficulty": "tiny", "num_games": 12, "max_turns": 3},
        )
        .rl_module(model_path=model_path)
        .env_runners(max_prompt_tokens=400, max_response_tokens=8, prompt_style="plain", max_episodes_in_flight=3)
        .engines(num_engines=engines, engine_kwargs={"max_model_len": 508})
        .env_runners(num_env_runners=runners)
        .evaluation(evaluation_split="generated", evaluation_temperature=1.0, evaluation_num_tasks=TASKS)
    )
    config.validate()
    return config


def entry_of(config: GRPOConfig) -> EnvironmentEntry:
    (entry,) = config.environment_entries()
    return entry


def set_of(config: GRPOConfig, size: int = TASKS) -> EvaluationSet:
    return choose_evaluation_set(entry_of(config), size)


def responses(player, evaluation_set: EvaluationSet) -> dict[str, list[np.ndarray]]:
    """Return the token ids of every response, which differ more than the results of episodes."""
    requests, settings = player._requests(evaluation_set, entry_of(player._config))
    pool = player._pool
    playing = {*pool.submit(requests, replace(settings, in_evaluation=False))}
    played = []
    while playing:
        samples, _ = pool.wait(playing, player._config.sample_timeout_s)
        assert samples
        played += samples.values()
        playing -= samples.keys()
    rollouts = [ray.get(sample.group).trajectories[0] for sample in played]
    return {rollout.task_id: [turn.response_ids for turn in rollout.turns] for rollout in rollouts}


def test_episodes_depend_on_the_task_alone(algorithm_of, model_path):
    config = config_of(model_path)
    evaluation_set = set_of(config)
    algo = algorithm_of(config)
    player = EvaluationPlayer(config, algo.workers)
    alone = responses(player, evaluation_set)
    whole = algo.evaluate_set(evaluation_set, entry_of(config))
    few = player.play(set_of(config, 3), entry_of(config))
    assert [episode.task_id for episode in whole.episodes] == list(evaluation_set.task_ids)
    assert few.episodes == whole.episodes[:3]
    assert len({ids.tobytes() for turns in alone.values() for ids in turns}) > TASKS  # the model says different things

    crowd = config_of(model_path, runners=2, engines=2)
    second = Evaluator(crowd)
    assert second.weights == algo.weights_checksum
    assert policy_protocol(crowd, evaluation_set, entry_of(crowd)) == whole.protocol
    with second.playing() as player:
        together = responses(player, evaluation_set)
        _check_loss_of_a_runner(player, evaluation_set, whole)
    assert together.keys() == alone.keys()
    for task, turns in alone.items():
        assert len(turns) == len(together[task])
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(turns, together[task], strict=True))


def _check_loss_of_a_runner(player, evaluation_set, whole):
    pids = player._pool._runners.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    assert len(pids) == 2
    episodes = []

    def kill_one(episode):
        episodes.append(episode.task_id)
        if len(episodes) == 1:
            os.kill(pids[0], signal.SIGKILL)

    assert player.play(evaluation_set, entry_of(player._config), on_episode=kill_one).episodes == whole.episodes
    assert sorted(episodes) == sorted(evaluation_set.task_ids)

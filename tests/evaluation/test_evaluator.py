"""Evaluation without a learner: the same episodes whatever plays them, continued where it was interrupted."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import ray

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.evaluation.panels import Panel, choose_panel
from trial_ray.evaluation.player import Evaluator, PanelPlayer, policy_protocol
from trial_ray.evaluation.results import EpisodeJournal, EvaluationResult

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]
TASKS = 8


def config_of(model_path: str, runners: int = 1, engines: int = 1) -> GRPOConfig:
    config = (
        GRPOConfig()
        .environment(
            "trial/ALFWorld-v0",
            env_config={"split": "generated", "difficulty": "tiny", "num_games": 12, "max_turns": 3},
        )
        .rl_module(model_path=model_path)
        .env_runners(max_prompt_tokens=400, max_response_tokens=8, prompt_style="plain", max_episodes_in_flight=3)
        .engines(
            engine="transformers",
            num_engines=engines,
            num_cpus_per_engine=0.25,
            engine_kwargs={"max_model_len": 508},
        )
        .env_runners(num_env_runners=runners, num_cpus_per_env_runner=0.25)
        .learners(num_learners=0, num_cpus_per_learner=0.25)
        .resources(num_cpus_for_main_process=0.25)
        .evaluation(evaluation_split="generated", evaluation_temperature=1.0, evaluation_num_tasks=TASKS)
    )
    config.validate()
    return config


def entry_of(config: GRPOConfig) -> EnvironmentEntry:
    (entry,) = config.environment_entries()
    return entry


def panel_of(config: GRPOConfig, size: int = TASKS) -> Panel:
    return choose_panel(entry_of(config), size)


def responses(player, panel: Panel) -> dict[str, list[np.ndarray]]:
    """Ids of every response, which tell far more than an episode's result does."""
    settings, environment = player._settings(entry_of(player._config), 0)
    settings = replace(settings, keep_trajectories=True)
    requests = [player._request(panel, index, environment) for index in range(len(panel))]
    workers = player._workers
    runners = {*workers.begin_groups(requests, settings).values()}
    played = []
    while len(played) < len(panel):
        taken, _ = workers.take_groups(runners, 1, player._config.sample_timeout_s, together=True)
        assert taken
        played += taken
    rollouts = [ray.get(ray.get(sample.refs.parts)[0])[0] for sample in played]
    return {rollout.task_id: [turn.response_ids for turn in rollout.turns] for rollout in rollouts}


def test_episodes_depend_on_the_task_alone_and_interruptions_cost_nothing(algorithm_of, model_path, tmp_path):
    config = config_of(model_path)
    panel = panel_of(config)
    algo = algorithm_of(config)
    player = PanelPlayer(config, algo.workers)
    alone = responses(player, panel)
    whole = algo.evaluate_panel(panel, entry_of(config))
    few = player.play(panel_of(config, 3), entry_of(config))
    assert [episode.task_id for episode in whole.episodes] == list(panel.task_ids)
    assert few.episodes == whole.episodes[:3]
    assert len({ids.tobytes() for turns in alone.values() for ids in turns}) > TASKS  # the model says different things

    crowd = config_of(model_path, runners=2, engines=2)
    second = Evaluator(crowd)
    assert second.weights == algo.weights_checksum
    protocol, path = policy_protocol(crowd, panel, entry_of(crowd)), tmp_path / "result.json"
    assert protocol == whole.protocol
    with second.playing() as player:
        together = responses(player, panel)
        _check_interruption(player, panel, path, protocol)
        _check_loss_of_a_runner(player, panel, whole)
    assert together.keys() == alone.keys()
    for task, turns in alone.items():
        assert len(turns) == len(together[task])
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(turns, together[task], strict=True))
    assert EvaluationResult.load(path).episodes == whole.episodes


def _check_interruption(player, panel, path, protocol):
    played = []

    def interrupt(episode):
        journal.add(episode)
        if len(journal.episodes) == 3:
            raise KeyboardInterrupt

    with EpisodeJournal(path, protocol, "w") as journal, pytest.raises(KeyboardInterrupt):
        player.play(panel, entry_of(player._config), on_episode=interrupt)
    with EpisodeJournal(path, protocol, "w") as journal:
        known = set(journal.episodes)
        assert len(known) == 3
        result = player.play(
            panel,
            entry_of(player._config),
            known=journal.episodes,
            on_episode=lambda episode: played.append(episode.task_id),
        )
        journal.finish(result)
    assert sorted(played) == sorted(set(panel.task_ids) - known)


def _check_loss_of_a_runner(player, panel, whole):
    pids = player._workers._runners.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    assert len(pids) == 2
    told = []

    def kill_one(episode):
        told.append(episode.task_id)
        if len(told) == 1:
            os.kill(pids[0], signal.SIGKILL)

    assert player.play(panel, entry_of(player._config), on_episode=kill_one).episodes == whole.episodes
    assert sorted(told) == sorted(panel.task_ids)

"""Evaluation without a learner: episodes do not depend on the number of env runners and engines, or on the loss of one."""

import os
import signal
import zlib
from dataclasses import replace

import pytest
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray.evaluation.evaluation_sets import choose_evaluation_set
from trial_ray.evaluation.player import Evaluator, play_evaluation_set, policy_protocol
from trial_ray.rollout.recording import read_trajectories

TASKS = 5


class HeardEnv(ChanceEnv):
    """Has a score that shows whether anything else was said."""

    ENV_ID = "mine/Heard-v0"

    def _info(self, won):
        said = "|".join(self.said[1:]).encode("utf-8", "surrogatepass")
        return {**super()._info(won), "score": zlib.crc32(said) / 2**32}


@pytest.mark.actors
def test_episodes_depend_on_the_task_alone(algorithm_of, model_path, tmp_path):
    def config(num_env_runners):
        return (
            config_of(model_path)
            .environment(HeardEnv.ENV_ID)
            .engines(engine_kwargs={"max_model_len": 508})
            .env_runners(num_env_runners=num_env_runners, num_cpus_per_env_runner=0.25, max_episodes_in_flight=3)
            .env_runners(max_prompt_tokens=400, max_response_tokens=8)
            .evaluation(evaluation_split="train", evaluation_temperature=1.0, evaluation_num_tasks=TASKS)
        )

    with registered(HeardEnv):
        alone = config(0)
        crowd = config(2)
        (entry,) = alone.environment_entries()
        evaluation_set = choose_evaluation_set(entry, TASKS)
        few = choose_evaluation_set(entry, 3)
        algo = algorithm_of(alone)
        whole = algo.evaluate_set(evaluation_set, entry)
        twice = play_evaluation_set(alone, algo.workers, replace(few, rollouts=2), entry).episodes
        assert [episode.task_id for episode in whole.episodes] == list(evaluation_set.task_ids)
        assert twice[::2] == whole.episodes[:3]
        assert [episode.task_id for episode in twice[1::2]] == list(few.task_ids)
        assert {episode.score for episode in twice[1::2]}.isdisjoint(episode.score for episode in twice[::2])
        assert len({episode.score for episode in whole.episodes}) == TASKS  # the model says different things

        crowd.recording(trajectories_folder=str(tmp_path)).validate()
        second = Evaluator(crowd)
        assert second.weights == algo.weights_checksum
        assert policy_protocol(crowd, evaluation_set, entry) == whole.protocol
        played = []
        with second.playing() as pool:
            pids = pool._runners.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)

            def kill_one(episode):
                if not played:
                    os.kill(pids[0], signal.SIGKILL)
                played.append(episode.task_id)

            together = play_evaluation_set(crowd, pool, evaluation_set, entry, on_episode=kill_one, recorded=True)
        assert len(pids) == 2
        assert together.episodes == whole.episodes
        assert sorted(played) == sorted(evaluation_set.task_ids)
        recorded = read_trajectories(tmp_path)  # An episode whose env runner was killed may be there twice.
        assert {each.task_id for each in recorded} == {*evaluation_set.task_ids}
        assert all(len(turn.prompt_ids) and turn.admissible_actions for each in recorded for turn in each.turns)

"""Rates and means under ``env_runners/`` are those of the recorded turns, however many env runners and calls played them."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset as ds
import pytest
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray.metrics import GROUPS
from trial_ray.runs.metric_files import flatten

pytestmark = pytest.mark.e2e

ITERATIONS = 3


def recorded(folder: Path, iteration: int) -> dict[str, float]:
    """The figures of an iteration, counted from its Parquet files alone."""
    rows = ds.dataset(folder, partitioning="hive").to_table(filter=ds.field("iteration") == iteration).to_pylist()
    rollouts = {(row["group_id"], row["rollout_index"]): [] for row in rows}
    for row in rows:
        rollouts[row["group_id"], row["rollout_index"]].append(row)
    completed = [turns for turns in rollouts.values() if turns[0]["ended"] != "failed"]
    turns = [turn for each in completed for turn in each]

    def share(of: list, found) -> float:
        return sum(map(found, of)) / len(of)

    return {
        "num_episodes": len(completed),
        "num_failed_episodes": len(rollouts) - len(completed),
        "num_env_steps_sampled": len(turns),
        "num_prompt_tokens": sum(len(turn["prompt_ids"]) for turn in turns),
        "num_response_tokens": sum(len(turn["response_ids"]) for turn in turns),
        "success_rate": share(completed, lambda each: each[0]["success"]),
        "score_mean": share(completed, lambda each: each[0]["score"]),
        "episode_return_mean": share(completed, lambda each: sum(turn["reward"] for turn in each)),
        "episode_return_min": min(sum(turn["reward"] for turn in each) for each in completed),
        "episode_return_max": max(sum(turn["reward"] for turn in each) for each in completed),
        "episode_len_mean": share(completed, len),
        "episode_len_min": min(map(len, completed)),
        "episode_len_max": max(map(len, completed)),
        "truncated_rate": share(completed, lambda each: each[0]["ended"] != "terminated"),
        "invalid_response_rate": share(turns, lambda turn: not turn["valid"]),
        "invalid_action_rate": share(turns, lambda turn: turn["invalid_action"]),
        "cut_response_rate": share(turns, lambda turn: turn["finish_reason"] == "length"),
        "cut_history_rate": share(turns, lambda turn: turn["prompt_cut"] != "none"),
        "cut_observation_rate": share(turns, lambda turn: turn["prompt_cut"] == "observation"),
    }


@pytest.mark.parametrize(
    "max_staleness",
    [pytest.param(0, id="refills"), pytest.param(1, id="one version behind")],
)
def test_rates_are_those_of_the_recorded_turns(max_staleness, algorithm_of, model_path, tmp_path):
    config = (
        config_of(model_path, tasks_per_iteration=4, importance_cap=2.0)
        .training(**({} if max_staleness else {"drop_zero_variance_groups": True, "max_refills": 2}))
        .environment(ChanceEnv.ENV_ID, env_config={"split": "train", "failure_rate": 0.3})
        .env_runners(max_group_redraws=3, max_staleness=max_staleness)
        .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.1)
        .evaluation(evaluation_split="train", evaluation_num_tasks=2, evaluation_env_config={"failure_rate": 0.0})
        .evaluation(evaluation_interval=2)
        .recording(trajectories_folder=str(tmp_path))
    )
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        results = [algo.train() for _ in range(ITERATIONS)]
    for iteration, result in enumerate(results, start=1):
        logged, expected = result["env_runners"], recorded(tmp_path, iteration)
        assert {name: float(logged[name]) for name in expected} == pytest.approx(expected, rel=1e-12)
    assert sum(result["env_runners"]["num_failed_episodes"] for result in results), "nothing was drawn again"
    turns = sum(result["env_runners"]["num_env_steps_sampled"] for result in results)
    assert results[-1]["env_runners"]["num_env_steps_sampled_lifetime"] == turns
    episodes = sum(result["env_runners"]["num_episodes"] for result in results)
    assert results[-1]["env_runners"]["num_episodes_lifetime"] == episodes
    evaluated = results[1]["evaluation"]["env_runners"]
    assert (evaluated["num_episodes"], evaluated["num_env_steps_sampled"]) == (2, 4)
    assert evaluated["episode_return_mean"] == evaluated["success_rate"] == evaluated["score_mean"]
    assert evaluated["episode_return_min"] <= evaluated["episode_return_mean"] <= evaluated["episode_return_max"]
    assert evaluated["episode_len_min"] == evaluated["episode_len_mean"] == evaluated["episode_len_max"] == 2
    rllibs = {metric.name for group in GROUPS if group.name == "rllib" for metric in group.metrics}
    assert not rllibs - flatten(results[2]).keys(), "after an evaluation all of RLlib's names are there"

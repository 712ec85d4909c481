"""Rates and means under ``env_runners/`` are those of the recorded turns, however many env runners and calls played them."""

import pandas
import pytest
from tiny_run import ChanceEnv, config_of, with_two_runners
from user_env import registered

from trial_ray.metrics import GROUPS
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.e2e


def recorded(folder, iteration):
    """The figures of an iteration, counted from its Parquet files alone."""
    rows = pandas.read_parquet(folder, filters=[("iteration", "==", iteration)]).set_index(
        ["group_id", "rollout_index"]
    )
    turns = rows[rows.ended != "failed"]
    of_episodes = turns.groupby(level=[0, 1])
    whole = of_episodes[["success", "score", "ended"]].first()
    return {
        "num_episodes": len(whole),
        "num_failed_episodes": rows.index.nunique() - len(whole),
        "num_env_steps_sampled": len(turns),
        "num_prompt_tokens": turns.prompt_ids.map(len).sum(),
        "num_response_tokens": turns.response_ids.map(len).sum(),
        "success_rate": whole.success.mean(),
        "score_mean": whole.score.mean(),
        **of_episodes.reward.sum().agg(["mean", "min", "max"]).add_prefix("episode_return_"),
        **of_episodes.size().agg(["mean", "min", "max"]).add_prefix("episode_len_"),
        "truncated_rate": (whole.ended != "terminated").mean(),
        "invalid_response_rate": (~turns.valid).mean(),
        "invalid_action_rate": turns.invalid_action.mean(),
        "cut_response_rate": (turns.finish_reason == "length").mean(),
        "cut_history_rate": (turns.prompt_cut != "none").mean(),
        "cut_observation_rate": (turns.prompt_cut == "observation").mean(),
    }


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_rates_are_those_of_the_recorded_turns(max_staleness, algorithm_of, model_path, tmp_path):
    config = (
        with_two_runners(config_of(model_path, tasks_per_iteration=4, importance_cap=2.0))
        .training(drop_zero_variance_groups=not max_staleness, max_refills=0 if max_staleness else 2)
        .environment(env_config={"split": "train", "failure_rate": 0.3})
        .env_runners(max_group_redraws=3, max_staleness=max_staleness)
        .evaluation(evaluation_env_config={"failure_rate": 0.0}, evaluation_interval=2)
        .recording(trajectories_folder=str(tmp_path))
    )
    with registered(ChanceEnv):
        algo = algorithm_of(config)
        results = [algo.train() for _ in range(3)]
    played = [result["env_runners"] for result in results]
    for iteration, logged in enumerate(played, start=1):
        expected = recorded(tmp_path, iteration)
        assert {name: float(logged[name]) for name in expected} == pytest.approx(expected, rel=1e-12)
    assert any(logged["num_failed_episodes"] for logged in played), "nothing was drawn again"
    assert max(result["learners"]["default_policy"]["rows"]["staleness_max"] for result in results) == max_staleness
    assert {result["groups"]["num_in_flight"] for result in results} == {4 * max_staleness}
    for count in ("num_env_steps_sampled", "num_episodes"):
        assert played[-1][f"{count}_lifetime"] == sum(logged[count] for logged in played)
    assert ["evaluation" in result["seconds"] for result in results] == [False, True, False]
    evaluated = results[1]["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 2
    assert evaluated["num_env_steps_sampled"] == 4
    assert evaluated["episode_return_mean"] == evaluated["success_rate"] == evaluated["score_mean"]
    assert evaluated["episode_len_min"] == evaluated["episode_len_mean"] == evaluated["episode_len_max"] == 2
    rllibs = {metric.name for group in GROUPS if group.name == "rllib" for metric in group.metrics}
    assert not rllibs - flatten(results[2]).keys(), "after an evaluation all of RLlib's names are there"

"""Runs with two environments: tasks by weight, metrics, records, evaluation sets, named rewards, and an environment of weight 0."""

from collections import Counter

import pytest
from faulty_env import TURNS, CountingEnv
from riddle_env import RiddleEnv
from tiny_run import with_small_actors
from user_env import registered

from trial_ray.adapters import EnvironmentAdapter
from trial_ray.algorithms import GRPOConfig
from trial_ray.algorithms.startup import list_tasks
from trial_ray.errors import ConfigError
from trial_ray.rollout.recording import read_trajectories
from trial_ray.runs.experiment import apply_overrides

RIDDLE, REWARDING = "Riddle-v0", "Rewarding-v0"


class RewardingEnv(CountingEnv):
    """Always won; long actions have larger rewards, and only the last turn has the reward ``end``."""

    ENV_ID = "mine/Rewarding-v0"

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        info["rewards"] = {"length": len(action) / 10, "turn": float(self.turn)} | ({"end": 1.0} if terminated else {})
        return observation, len(action) / 10, terminated, truncated, info


def config_of(riddles, others, model_path="some/model", folder=None):
    """Return the config of a run with riddles and another environment."""
    return (
        with_small_actors(GRPOConfig())
        .environment(
            environments=[(RiddleEnv.ENV_ID, {"words": ("red", "green")}, riddles), (RewardingEnv.ENV_ID, {}, others)],
            adapter=EnvironmentAdapter(RiddleEnv.ENV_ID, max_turns=2, num_seeds=50),
        )
        .rl_module(model_path=model_path)
        .training(
            reward="per_turn",
            group_size=2,
            tasks_per_iteration=4,
            minibatch_rows=32,
            microbatch_rows=8,
            ref_kl_coeff=0.0,
        )
        .env_runners(max_prompt_tokens=300, max_response_tokens=4, prompt_style="plain", environment_processes=True)
        .engines(engine_kwargs={"max_model_len": 508})
        .evaluation(
            evaluation_num_tasks=3,
            evaluation_split={RIDDLE: "test", REWARDING: "train"},
            evaluation_env_config={RIDDLE: {"words": ("blue",)}},
        )
        .recording(trajectories_folder=folder and str(folder))
    )


@pytest.mark.actors
@registered(RiddleEnv, RewardingEnv)
def test_a_run_counts_and_evaluates_every_environment(algorithm_of, model_path, tmp_path):
    algo = algorithm_of(config_of(3, 1, model_path, tmp_path / "trajectories"))
    played = algo.train()["env_runners"]
    assert [played[name]["num_episodes"] for name in (RIDDLE, REWARDING)] == [6, 2]
    # Any three actions win Rewarding; a riddle ends after two guesses.
    assert played[REWARDING]["success_rate"] == 1.0
    assert played[REWARDING]["episode_len_mean"] == 3.0
    assert played[RIDDLE]["episode_len_mean"] <= 2
    assert played["success_rate"] == pytest.approx((2 + 6 * played[RIDDLE]["success_rate"]) / 8)
    assert algo.tasks.get_state()["drawn"] == [3, 1]
    results = algo.evaluate_sets()
    assert list(results) == [RIDDLE, REWARDING]
    for name, result in results.items():
        evaluation_set, entry = algo.evaluation_sets[name]
        assert [episode.task_id for episode in result.episodes] == list(evaluation_set.task_ids)
        assert len(evaluation_set) == 3
        assert entry.name == name
        assert result.protocol["split"] == entry.split
    assert [result.protocol["max_turns"] for result in results.values()] == [2, 50]
    rates = algo.evaluate()["env_runners"]
    assert rates["success_rate"] == (rates[RIDDLE]["success_rate"] + 1) / 2
    trajectories = read_trajectories(tmp_path / "trajectories")
    assert Counter(trajectory.environment for trajectory in trajectories) == {RIDDLE: 6, REWARDING: 2}
    rewarded = [trajectory for trajectory in trajectories if trajectory.environment == REWARDING]
    assert {trajectory.family for trajectory in rewarded} == {"counting"}
    length = pytest.approx(sum(trajectory.episode_return for trajectory in rewarded) / 2)
    means = {"length_mean": length, "turn_mean": sum(range(TURNS + 1)), "end_mean": 1.0}
    assert played[REWARDING]["rewards"] == played["rewards"] == means


@registered(RewardingEnv, RiddleEnv)
def test_a_weight_of_0_needs_an_evaluation_set():
    config = config_of(0.0, 1.0)
    config.validate()
    assert {request.environment for request in list_tasks(config)[0].draw(4, 2)} == {1}
    for split in (None, {REWARDING: "test"}):
        with pytest.raises(ConfigError, match="Riddle-v0 has weight 0"):
            config.copy(copy_frozen=False).evaluation(evaluation_split=split, evaluation_env_config={}).validate()
    with pytest.raises(ConfigError, match=r"-1.0"):
        config_of(-1.0, 1.0).validate()


@registered(RiddleEnv, RewardingEnv)
def test_evaluation_sets_are_of_environments_of_the_run():
    config = config_of(3, 1)
    riddle, rewarding = config.evaluation_entries()
    assert dict(riddle.config) == {"words": ("blue",), "split": "test"}
    assert rewarding.split == "train"
    config.evaluation(evaluation_split={REWARDING: "test"}, evaluation_env_config={})
    assert [entry.name for entry in config.evaluation_entries()] == [REWARDING]
    with pytest.raises(ConfigError, match="'Chess-v0'"):
        config.evaluation(evaluation_split={"Chess-v0": "test"}).evaluation_entries()


def test_environments_replace_earlier_ones_with_their_arguments():
    first, shop = "trial/ALFWorld-v0", ("trial/WebShop-v0", {}, 1.0)
    config = GRPOConfig().environment(first, env_config={"split": "generated"}).rl_module(model_path="m")
    config.environment(environments=[(first, {"difficulty": "tiny"}, 1.0), shop]).validate()
    config.environment(environments=[(first, {"num_games": 8}, 1.0), shop]).validate()
    assert config.env_config == {"num_games": 8}
    apply_overrides(config, [f"environments=[('{first}', {{'num_games': 9}}, 1.0)]"]).validate()
    config.environment(shop[0]).validate()
    assert config.env == shop[0]
    assert config.env_config == {}
    config.environment(environments=[(first, {}, 1.0), shop]).env_config = {"num_games": 3}
    with pytest.raises(ConfigError, match="each with its own keyword arguments"):
        config.validate()
    with pytest.raises(ConfigError, match="environments has 'mine'"):
        config.environment(environments=["mine"])

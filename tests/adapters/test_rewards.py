"""Rewards of turns, rewards by name, and an environment that is evaluated and not trained in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faulty_env import TURNS, CountingEnv
from riddle_env import RiddleEnv
from synthetic_groups import synthetic_groups
from tiny_run import with_small_actors
from user_env import registered

from trial_ray.adapters import EnvironmentAdapter
from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import ConfigError, TrainingDivergedError
from trial_ray.learner.rows import group_turn_rows
from trial_ray.rollout.groups import RolloutCounts
from trial_ray.rollout.recording import read_trajectories

REWARDING, RIDDLE = "Rewarding-v0", "Riddle-v0"


class RewardingEnv(CountingEnv):
    """Always won; long actions earn more, and the last turn alone has a reward of the name ``end``."""

    ENV_ID = "mine/Rewarding-v0"

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        info["rewards"] = {"length": len(action) / 10, "turn": float(self.turn)} | ({"end": 1.0} if terminated else {})
        return observation, len(action) / 10, terminated, truncated, info


def config_of(model_path, weight=0.0) -> GRPOConfig:
    environments = [(RewardingEnv.ENV_ID, {}, 1.0), (RiddleEnv.ENV_ID, {"words": ("red", "green")}, weight)]
    return (
        with_small_actors(GRPOConfig())
        .environment(environments=environments, adapter=EnvironmentAdapter(RiddleEnv.ENV_ID, max_turns=2, num_seeds=50))
        .rl_module(model_path=model_path)
        .training(
            reward="per_turn",
            group_size=4,
            tasks_per_iteration=2,
            minibatch_rows=32,
            microbatch_rows=8,
            ref_kl_coeff=0.0,
        )
        .env_runners(max_prompt_tokens=300, max_response_tokens=4, prompt_style="plain", environment_processes=True)
        .engines(engine_kwargs={"max_model_len": 508})
        .evaluation(evaluation_split="test", evaluation_num_tasks=3)
    )


@pytest.mark.actors
@registered(RewardingEnv, RiddleEnv)
def test_turns_are_trained_on_their_rewards_and_an_environment_of_weight_0_is_evaluated_alone(
    algorithm_of, model_path, tmp_path
):
    algo = algorithm_of(config_of(model_path).recording(trajectories_folder=str(tmp_path / "trajectories")))
    result = algo.train()
    played = read_trajectories(tmp_path / "trajectories")
    assert {trajectory.environment for trajectory in played} == {REWARDING}
    assert (len(played), algo.tasks.get_state()["drawn"]) == (8, [2, 0])
    found = result["env_runners"]
    returns = [trajectory.episode_return for trajectory in played]
    assert found["rewards"]["length_mean"] == pytest.approx(sum(returns) / 8)
    assert found["rewards"]["turn_mean"] == sum(range(TURNS + 1))
    assert found["rewards"]["end_mean"] == found["success_rate"] == 1.0
    assert found[REWARDING]["rewards"] == found["rewards"]
    assert RIDDLE not in found
    # Every rollout succeeded, so that turns alone differ.
    assert result["groups"]["zero_variance_fraction"] == 0.0
    rates = algo.evaluate()["env_runners"]
    assert [rates[name]["num_episodes"] for name in (REWARDING, RIDDLE)] == [3, 3]


@registered(RewardingEnv, RiddleEnv)
def test_a_weight_of_0_needs_an_evaluation_set_and_another_environment():
    config = config_of("some/model")
    config.validate()
    for split in (None, {REWARDING: "test"}):
        with pytest.raises(ConfigError, match="Riddle-v0 has weight 0 and no evaluation set"):
            config.copy(copy_frozen=False).evaluation(evaluation_split=split).validate()
    with pytest.raises(ConfigError, match=r"weight of mine/Riddle-v0 is -1.0"):
        config_of("some/model", -1.0).validate()


def test_a_named_reward_is_a_mean_over_the_rollouts_that_were_given_it():
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=4)
    for trajectory, rewards in zip(
        group.trajectories, ({"form": 1.0}, {"form": -0.5, "speed": 2.0}, {}, {"speed": 9.0}), strict=True
    ):
        trajectory.rewards = rewards
    group.trajectories[3].ended = "failed"
    counts = RolloutCounts.of(group.trajectories[:2]) + RolloutCounts.of(group.trajectories[2:])
    named = {name: value for name, value in counts.metrics().items() if name.startswith("rewards/")}
    assert named == {"rewards/form_mean": 0.25, "rewards/speed_mean": 2.0}
    assert counts.metrics() == pytest.approx(RolloutCounts.of(group.trajectories).metrics())


def test_a_turn_is_compared_with_the_same_turn_of_other_rollouts():
    """γ = 0.5: of the second turns one earned 1 and one nothing; the third is alone."""
    (group,) = synthetic_groups(vocab_size=400, num_groups=1, group_size=2)
    for trajectory, rewards in zip(group.trajectories, ((0.0, 1.0), (0.0, 0.0, 0.0)), strict=True):
        trajectory.success = True
        turn = replace(trajectory.turns[0], valid=True)
        trajectory.turns = [replace(turn, reward=reward) for reward in rewards]
    config = GRPOConfig().training(reward="per_turn", advantage_norm="mean_norm", turn_discount=0.5, turn_coeff=2.0)
    assert group_turn_rows([group], config).advantages.tolist() == [0.5, 1.0, -0.5, -1.0, 0.0]
    with pytest.raises(TrainingDivergedError, match="not finite"):
        group_turn_rows([_huge(group)], config.training(reward_scale=1e10))


def test_cut_responses_can_be_left_out_of_the_loss_and_stay_in_the_statistics():
    groups = synthetic_groups(vocab_size=400, num_groups=2, group_size=3)
    first = groups[0].trajectories[0]
    first.turns[0] = replace(first.turns[0], finish_reason="length")
    plain = group_turn_rows(groups, GRPOConfig())
    masked = group_turn_rows(groups, GRPOConfig().training(mask_truncated=True))
    assert plain.mask.all()
    cut = [turn.finish_reason == "length" for turn in masked.turns]
    assert masked.mask.tolist() == [not cut[turn] for turn in masked.turn_ids.tolist()]
    assert masked.advantages.tolist() == plain.advantages.tolist()


def _huge(group):
    for trajectory in group.trajectories:
        trajectory.turns = [replace(turn, reward=1e305) for turn in trajectory.turns]
    return group

"""An environment that is registered in the driver alone, and its adapter, reach remote env runners and a remote learner."""

from __future__ import annotations

import gymnasium
import pytest
from ray.rllib.core.learner.learner_group import LearnerGroup
from riddle_env import Curt, RiddleEnv
from small_learners import SPACES
from tiny_run import with_small_actors
from user_env import registered

from trial_ray.algorithms.methods import new_config
from trial_ray.environments import EnvironmentAdapter
from trial_ray.learner.connectors import encode_views
from trial_ray.models.loading import load_tokenizer
from trial_ray.rollout.recording import read_trajectories
from trial_ray.rollout.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]
ENV_ID = RiddleEnv.ENV_ID
OWN = EnvironmentAdapter(
    ENV_ID,
    templates={"plain": Curt("captain")},
    skills={"words": "spell it", "": "think first"},
    success=lambda info, episode_return: episode_return >= 0,
    max_turns=3,
)


def config_of(model_path, folder):
    return (
        with_small_actors(new_config("sdar"))
        .environment(ENV_ID, env_config={"told": ("task", "admissible_actions")}, adapter=OWN)
        .rl_module(model_path=model_path)
        .training(lr=1e-3, group_size=2, tasks_per_iteration=4, minibatch_rows=12, microbatch_rows=6, kl_coeff=0.0)
        .env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain")
        .engines(engine_kwargs={"max_model_len": 508})
        .recording(trajectories_folder=str(folder))
    )


@pytest.mark.long
@registered(RiddleEnv)
def test_runners_play_it_in_its_words_and_a_learner_shows_its_advice(algorithm_of, model_path, tmp_path):
    def views_of(learner) -> list[str]:
        tokenizer = learner.policy_module.tokenizer
        turn = Turn(*[None] * 3, 1, 0, "it begins with r", "red", True, "right", 1.0, "stop")
        trajectories = [Trajectory("1", family, 0, [turn], environment="Riddle-v0") for family in ("words", "numbers")]
        return [tokenizer.decode(each.ids) for each in encode_views(trajectories, learner.config, tokenizer)]

    def known_in(runner) -> bool:
        return ENV_ID in gymnasium.registry

    config = config_of(model_path, tmp_path)
    algo = algorithm_of(config)
    algo.train()
    assert algo.env_runner_group.foreach_env_runner(known_in, local_env_runner=False) == [False]
    config = config.copy(copy_frozen=False).learners(num_learners=1)
    learners = LearnerGroup(config=config, module_spec=config.get_multi_rl_module_spec(spaces=SPACES))
    (views,) = learners.foreach_learner(views_of)
    learners.shutdown()
    assert [view.rstrip().rpartition("\n")[2] for view in views.get()] == ["spell it", "think first"]
    tokenizer, trajectories = load_tokenizer(model_path), read_trajectories(tmp_path)
    prompts = [tokenizer.decode(turn.prompt_ids) for trajectory in trajectories for turn in trajectory.turns]
    assert len(trajectories) == 8
    assert all("captain, choose one: red, green, blue, white" in prompt for prompt in prompts)
    assert all(trajectory.success and len(trajectory.turns) <= 3 for trajectory in trajectories)
    assert {trajectory.environment for trajectory in trajectories} == {"Riddle-v0"}

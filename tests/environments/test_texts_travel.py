"""The prompt template and the advice of an experiment file reach remote env runners and a remote learner."""

from __future__ import annotations

import logging

import pytest
from faulty_env import ENV_ID, registered
from own_texts import own_config

from trial_ray.learner.connectors import encode_views
from trial_ray.models.tokenizer import build_tokenizer
from trial_ray.rollout.recording import read_turns
from trial_ray.rollout.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]
UNHEARD = "has no prompt template of its own"


def config_of(folder, model_path, **learners):
    return (
        own_config(folder)
        .policy(model_path=model_path)
        .training(lr=1e-3, group_size=2, tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, kl_coeff=0.0)
        .rollouts(max_prompt_tokens=200, max_response_tokens=4)
        .engines(engine="transformers", num_cpus_per_engine=0.25)
        .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
        .learners(num_cpus_per_learner=0.25, **learners)
        .resources(num_cpus_for_main_process=0.25)
        .recording(trajectories_folder=str(folder / "trajectories"))
        .debugging(seed=1)
    )


@registered()
def test_runners_write_the_template_and_a_learner_shows_the_advice(model_path, tmp_path, caplog):
    def views_of(learner) -> list[str]:
        tokenizer = learner.policy_module.tokenizer
        turn = Turn(*[None] * 3, 1, 0, "You count: 0.", "count", True, "You count: 1.", 0.0, "stop")
        trajectories = [Trajectory("one", family, 0, [turn]) for family in ("counting", "dancing")]
        return [tokenizer.decode(ids) for ids in encode_views(trajectories, learner.config, tokenizer)]

    with caplog.at_level(logging.WARNING):
        algo = config_of(tmp_path, model_path, num_learners=1).build_algo()
    try:
        assert UNHEARD not in caplog.text
        algo.train()
        (views,) = algo.learner_group.foreach_learner(views_of)
        assert [view.rstrip().rpartition(": ")[2] for view in views.get()] == ["count on", "think first"]
    finally:
        algo.stop()
    tokenizer = build_tokenizer()
    prompts = [tokenizer.decode(ids) for ids in read_turns(tmp_path / "trajectories")["prompt_ids"].to_pylist()]
    assert len(prompts) == 12
    assert all("captain, choose one: count, wait" in prompt for prompt in prompts)


@registered()
def test_the_generic_template_is_told_once_with_the_setting_that_replaces_it(model_path, tmp_path, caplog):
    config = config_of(tmp_path, model_path).rollouts(prompt_template=None)
    with caplog.at_level(logging.WARNING):
        algo = config.build_algo()
    try:
        algo.train()
        algo.train()
    finally:
        algo.stop()
    (told,) = [record.getMessage() for record in caplog.records if UNHEARD in record.getMessage()]
    assert told.startswith(f"{ENV_ID} has no prompt template")
    assert ".rollouts(prompt_template=...)" in told

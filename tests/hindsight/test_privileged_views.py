"""What the second views show: the fact, the advice or the solution that a method asks for, and nothing of another turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

import trial_envs
from trial_ray.environments.skills import SKILLS
from trial_ray.errors import ConfigError
from trial_ray.hindsight.privileged_views import VIEWS, TurnContext, offered_views, privileged_view
from trial_ray.inference.protocol import Response, SamplingParams
from trial_ray.rollout.episode import EpisodePlayer
from trial_ray.rollout.guarded_env import GuardedEnv
from trial_ray.rollout.prompts import PromptBuilder

WON = TurnContext(
    environment="trial/ALFWorld-v0",
    family="pick_and_place_simple",
    outcome="You move the mug 1 to the shelf 1.",
    terminal=True,
    success=True,
    solution=("go to desk 1", "take mug 1 from desk 1"),
)


def test_outcome_adds_the_verdict_and_feedback_tells_the_answer_alone():
    assert privileged_view("outcome", WON).text.startswith(WON.outcome)
    assert "succeeded" in privileged_view("outcome", WON).text
    assert WON.outcome in privileged_view("feedback", WON).text
    assert "succeeded" not in privileged_view("feedback", WON).text


def test_advice_is_the_familys_and_tells_nothing_of_the_turn():
    heat = replace(WON, family="pick_heat_then_place_in_recep")
    advice = {privileged_view("skill", context).text for context in (WON, heat)}
    assert len(advice) == 2
    assert privileged_view("skill", replace(WON, outcome="Nothing happens.")) == privileged_view("skill", WON)


@pytest.mark.parametrize("env_id", ["trial/ALFWorld-v0", "trial/WebShop-v0"])
def test_every_family_of_generated_tasks_has_advice_of_its_own(env_id):
    trial_envs.register()
    env = gymnasium.make(env_id, disable_env_checker=True, split="generated", num_games=60)
    families = {env.unwrapped.family(task) for task in env.unwrapped.tasks()}
    env.close()
    assert families <= SKILLS[env_id].keys()
    assert len({SKILLS[env_id][family] for family in families}) == len(families)


def test_the_solution_view_lists_the_actions_and_needs_some():
    assert privileged_view("solution", WON).text.endswith("go to desk 1, take mug 1 from desk 1")
    with pytest.raises(ConfigError, match=r"`walkthrough`.*trial/ALFWorld-v0 gave none"):
        privileged_view("solution", replace(WON, solution=()))


def test_advice_is_offered_only_where_it_was_written():
    assert offered_views("trial/ALFWorld-v0") == list(VIEWS)
    assert offered_views("some/Env-v0") == [name for name in VIEWS if name != "skill"]


@pytest.mark.parametrize(
    ("env_id", "split"),
    [("trial/ALFWorld-v0", "generated"), ("trial/WebShop-v0", "generated"), ("trial/TextWorld-v0", "train")],
)
def test_an_episode_keeps_its_environments_solution_and_shows_it_to_nobody(env_id, split):
    trial_envs.register()
    tokenizer = chat_tokenizer("qwen3")
    env = gymnasium.make(env_id, disable_env_checker=True, split=split, max_turns=2)
    builder = PromptBuilder(tokenizer, env_id, max_prompt_tokens=100_000, style="plain")
    player = EpisodePlayer(builder, tokenizer.decode, SamplingParams(max_tokens=4), seeded=False)
    seen = []

    async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        seen.append(tokenizer.decode(prompt_ids))
        ids = np.asarray(tokenizer.encode("wait"), np.int32)
        return Response(ids, np.zeros(len(ids), np.float32), 1, "stop")

    trajectory = asyncio.run(player.play(GuardedEnv(lambda: env, env_id), env.unwrapped.tasks()[0], 0, 0, generate))
    assert not trajectory.failed, trajectory.error
    assert trajectory.solution == tuple(env.unwrapped.walkthrough)
    assert len(trajectory.solution) > 1
    assert not any(", ".join(trajectory.solution) in prompt for prompt in seen)
    env.close()

"""What the second views show: the fact, the advice or the solution that a method asks for, and nothing of another turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from chat_tokenizers import chat_tokenizer

from trial_ray.environments import alfworld, webshop
from trial_ray.environments.entry import make_entries
from trial_ray.environments.guarded_env import GuardedEnv
from trial_ray.errors import ConfigError
from trial_ray.hindsight.privileged_views import TurnContext, privileged_view
from trial_ray.inference.protocol import Response, SamplingParams
from trial_ray.rollout.episode import PolicyPlayer, play_episode
from trial_ray.rollout.prompts import PromptBuilder

WON = TurnContext(
    environment="trial/ALFWorld-v0",
    family="pick_and_place_simple",
    outcome="You move the mug 1 to the shelf 1.",
    terminal=True,
    success=True,
    solution=("go to desk 1", "take mug 1 from desk 1"),
    skills=alfworld.SKILLS,
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


@pytest.mark.parametrize("adapter", [alfworld.ADAPTER, webshop.ADAPTER], ids=["ALFWorld", "WebShop"])
def test_every_family_of_generated_tasks_has_advice_of_its_own(adapter):
    (entry,) = make_entries([(adapter.env_id, adapter.generated(0, 60), 1.0)])
    env = entry.make()
    families = {env.unwrapped.family(task) for task in env.unwrapped.tasks()}
    env.close()
    assert families <= adapter.skills.keys()
    assert len({adapter.skills[family] for family in families}) == len(families)


def test_a_family_without_advice_of_its_own_gets_the_general_one():
    context = replace(WON, family="dancing", skills={"": "think first"})
    assert privileged_view("skill", context).text == "Advice for this kind of task: think first"
    with pytest.raises(ConfigError, match=r"the adapter of trial/ALFWorld-v0 has none"):
        privileged_view("skill", replace(WON, skills={}))


def test_the_solution_view_lists_the_actions_and_needs_some():
    assert privileged_view("solution", WON).text.endswith("go to desk 1, take mug 1 from desk 1")
    with pytest.raises(ConfigError, match=r"`walkthrough`.*trial/ALFWorld-v0 gave none"):
        privileged_view("solution", replace(WON, solution=()))


@pytest.mark.parametrize(
    ("env_id", "split"),
    [("trial/ALFWorld-v0", "generated"), ("trial/WebShop-v0", "generated"), ("trial/TextWorld-v0", "train")],
)
def test_an_episode_keeps_its_environments_solution_and_shows_it_to_nobody(env_id, split):
    tokenizer = chat_tokenizer("qwen3")
    (entry,) = make_entries([(env_id, {"split": split, "max_turns": 2}, 1.0)])
    env = GuardedEnv(entry)
    builder = PromptBuilder(tokenizer, entry.adapter.template("plain"), max_prompt_tokens=100_000)
    seen = []

    async def generate(prompt_ids: np.ndarray, params: SamplingParams) -> Response:
        seen.append(tokenizer.decode(prompt_ids))
        ids = np.asarray(tokenizer.encode("wait"), np.int32)
        return Response(ids, np.zeros(len(ids), np.float32), 1, "stop")

    player = PolicyPlayer(builder, tokenizer.decode, SamplingParams(max_tokens=4), generate)
    trajectory = asyncio.run(play_episode(env, entry.tasks()[0], player))
    assert not trajectory.failed, trajectory.error
    assert trajectory.solution == env.walkthrough()
    assert len(trajectory.solution) > 1
    assert not any(", ".join(trajectory.solution) in prompt for prompt in seen)
    env.close()

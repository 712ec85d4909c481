"""Conversations: how responses are closed, what stays over the limit; how templates are written is in test_published_templates."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from chat_tokenizers import bare_tokenizer, chat_tokenizer
from riddle_env import RiddleEnv
from user_env import entry_of

from trial_ray.adapters import alfworld, external, webshop
from trial_ray.adapters.guarded import GuardedEnv, StepResult
from trial_ray.adapters.templates import PromptContext
from trial_ray.errors import ChatTemplateError
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.rollout.episode import play_episode
from trial_ray.trajectory import Turn

HOME = alfworld.ADAPTER
TASK = "put some pencil on desk."
SAID = "<think>so</think><action>look</action>"


def builder(model="qwen3", limit=100_000, window=2, adapter=HOME) -> ConversationBuilder:
    return ConversationBuilder(chat_tokenizer(model), adapter.template("conversation"), limit, window)


def shown(observation: str, actions=("go to desk 1", "help", "look"), task=TASK) -> StepResult:
    return StepResult(observation, task, "", list(actions), won=False, score=0.0)


def sampled(tokenizer, text: str, *, stop: bool = True) -> np.ndarray:
    """Ids that spell ``text`` letter by letter, as a model may sample them and no tokenizer would write them."""
    ids = [token for letter in text for token in tokenizer.encode(letter, add_special_tokens=False)]
    return np.asarray([*ids, *([tokenizer.eos_token_id] if stop else [])], np.int32)


def take(build: ConversationBuilder, played: list[Turn], result: StepResult, response: np.ndarray) -> Turn:
    """Write a turn's prompt and add the turn."""
    prompt = build.write(result, played)
    assert prompt.ids.dtype == np.int32
    played.append(
        Turn(
            prompt_ids=prompt.ids,
            response_ids=response,
            logprobs=np.zeros(len(response), np.float32),
            weight_version=0,
            insert_at=prompt.insert_at,
            observation=result.observation,
            action="look",
            valid=True,
            outcome="",
            reward=0.0,
            finish_reason="stop",
            prompt_cut=prompt.cut,
        )
    )
    return played[-1]


def context(result: StepResult, step: int) -> PromptContext:
    return PromptContext(result.task, result.observation.strip(), result.admissible_actions, (), step)


def long_episode(build: ConversationBuilder, num_turns: int, observation=lambda step: f"ROOM{step} " + "desk " * 20):
    played = []
    for step in range(1, num_turns + 1):
        take(build, played, shown(observation(step)), sampled(build._tokenizer, f"<action>{step}</action>"))
    return played


class RestartingEnv(RiddleEnv):
    """Every step starts another conversation."""

    ENV_ID = "mine/Restarting-v0"

    def reset(self, *, seed=None, options=None):
        return "the first room", {"task": TASK, "won": False}

    def step(self, action):
        return "the next room", 0.0, False, False, {"task": TASK, "won": False, "past_turns": 0}


def test_a_response_without_an_action_stays_in_the_new_conversation():
    """The second response holds no action, and is answered without a step."""
    build = builder()
    tokenizer = build._tokenizer

    class Player:
        async def act(self, result, history, step):
            played = list(history)
            response = sampled(tokenizer, f"<action>{step}</action>")
            turn = take(build, played, result, response)
            return replace(turn, outcome="Say one action." if step == 2 else "") if step < 4 else None

    trajectory = asyncio.run(play_episode(GuardedEnv(entry_of(RestartingEnv)), "7", Player()))
    third = tokenizer.decode(trajectory.turns[2].prompt_ids)
    assert [f"<action>{step}</action>" in third for step in (1, 2)] == [False, True]
    assert "Say one action." in third


@pytest.mark.parametrize(("window", "kept"), [(0, 0), (2, 2), (50, 5)])
def test_over_the_limit_it_starts_again_with_the_last_turns_as_they_were(window, kept):
    whole = long_episode(builder(window=window), 7)
    build = builder(limit=len(whole[-1].prompt_ids) - 1, window=window)
    played = long_episode(build, 7)
    tokenizer, last = build._tokenizer, played[-1]
    assert [turn.prompt_cut for turn in played] == ["none"] * 6 + ["history"]
    for turn, other in zip(played[:-1], whole, strict=False):
        assert np.array_equal(turn.prompt_ids, other.prompt_ids)
    text = tokenizer.decode(last.prompt_ids)
    assert [step for step in range(1, 8) if f"ROOM{step}" in text] == list(range(7 - kept, 8))
    # The ids of the kept turns are those of the whole conversation's end, responses included.
    system = tokenizer.encode(f"<|im_start|>system\n{build.template.system(TASK)}<|im_end|>\n")
    assert last.prompt_ids[: len(system)].tolist() == system
    tail = last.prompt_ids[len(system) :].tolist()
    assert whole[-1].prompt_ids[-len(tail) :].tolist() == tail


@pytest.mark.parametrize("adapter", [HOME, webshop.ADAPTER, external.TEXTWORLD], ids=lambda adapter: adapter.name)
def test_the_conversation_of_a_tagged_template_shows_what_it_shows(adapter):
    template, tagged = adapter.template("conversation"), adapter.template("tagged")
    now = context(shown("Instruction: [SEP] a lamp [SEP] You see a desk 1."), 3)
    system, message = template.system(now.task), template.render(now)
    assert system.startswith(tagged.role)
    assert f"Your task: {TASK}" in system
    assert message in tagged.render(replace(now, history=()))
    assert ("help" in message) == (adapter is not HOME)
    assert template.project("x" * 99) == tagged.project("x" * 99)
    assert template.project(SAID).valid


LOOP = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no users here') }}", "messages of user: no users here"),
        (LOOP.replace("<|im_end|>", "{{ '.' if message.role == 'assistant' else '<|im_end|>' }}"), "close a response"),
        (
            LOOP.replace("<|im_start|>{{", "<|im_start|>{{ messages | length }} {{"),
            "does not start with the shorter one",
        ),
        (LOOP.replace("in messages", "in messages | reverse"), "occurs 0 times"),
    ],
)
def test_chat_templates_that_hold_no_growing_conversation_are_named(template, found):
    tokenizer = bare_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=found):
        ConversationBuilder(tokenizer, HOME.template("conversation"), 1000)


def test_a_model_that_does_not_stop_where_the_template_ends_a_response_is_refused():
    build, tokenizer = builder("qwen3"), chat_tokenizer("qwen3")
    build.require_end([tokenizer.pad_token_id, tokenizer.eos_token_id])
    found = rf"with <\|im_end\|>, .*stop tokens \(<\|endoftext\|>\).*{tokenizer.eos_token_id}, to eos"
    with pytest.raises(ChatTemplateError, match=found):
        build.require_end([tokenizer.pad_token_id])

"""Single-turn prompts, unusable chat templates, and the text of responses."""

from functools import partial

import numpy as np
import pytest
from chat_tokenizers import bare_tokenizer, chat_tokenizer
from prompt_games import ids_of, shown, writer_of

from trial_ray import GRPOConfig
from trial_ray.adapters import alfworld, webshop
from trial_ray.errors import ChatTemplateError, ConfigError, PromptTooLongError
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.styles import prompt_writer
from trial_ray.prompts.teacher_context import CUT_MARK
from trial_ray.prompts.writer import ResponseTexts
from trial_ray.trajectory import Turn

HOME = alfworld.ADAPTER
ACTIONS = ("go to bed 1", "go to desk 1", "help", "look")
WELCOME = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou see a bed 1, and a desk 1.\n\nYour task is to: put some pencil on desk."
)
FIRST = (shown(WELCOME, ACTIONS), [])
LATER = (
    shown("You arrive at desk 1. On the desk 1, you see a pencil 1.", ACTIONS),
    [
        Turn(observation=WELCOME, action="look"),
        Turn(observation="OLD OBSERVATION", action="go to bed 1"),
        Turn(observation="Nothing happens.", action="go to desk 1"),
    ],
)


def builder(model="qwen3", style="tagged", **limits):
    return writer_of(chat_tokenizer(model), style, **limits)


def message(built, prompt):
    return built._tokenizer.decode(prompt.ids)


def test_chat_template_kwargs_reach_the_chat_template():
    config = GRPOConfig().environment("trial/ALFWorld-v0").rl_module(chat_template_kwargs={"enable_thinking": False})
    for style in ("tagged", "conversation"):
        writer = prompt_writer(chat_tokenizer("qwen3"), config.env_runners(prompt_style=style), HOME)
        assert message(writer, writer.write(shown("You arrive."), ())).endswith("assistant\n<think>\n\n</think>\n\n")


def test_a_turn_shows_task_observation_actions_and_its_last_records():
    build = builder()
    first, later = (message(build, build.write(*turn)) for turn in (FIRST, LATER))
    for part in (
        WELCOME,
        "go to bed 1\ngo to desk 1\nlook",
        "<think> and </think>",
        "<action> and </action>",
        "put some pencil on desk",
    ):
        assert first.count(part) == 1
    assert "help" not in first
    assert "Welcome" not in later
    order = [
        "put some pencil on desk.",
        "Steps taken so far: 3.",
        "[step 2] The environment showed: OLD",
        "go to bed 1",
        "[step 3]",
        "Nothing happens.",
        "This is step 4.",
        "You arrive at desk 1.",
    ]
    positions = [later.index(piece) for piece in order]
    assert positions == sorted(positions)
    for window, seen in ((0, 0), (3, 3), (9, 3)):
        build = builder(window=window)
        assert message(build, build.write(*LATER)).count("You did:") == seen
    answered = Turn(observation=WELCOME, actions=("look", "go to bed 1"), answers=("OLD", "OBSERVATION"))
    assert "This is step 3." in message(build, build.write(LATER[0], [answered]))


def test_plain_prompts_are_bare_words_with_verbatim_actions():
    build = builder("tiny", "plain")
    assert message(build, build.write(*LATER)) == (
        "<|user|>put some pencil on desk\n"
        "old observation\n> go to bed 1\n"
        "nothing happens\n> go to desk 1\n"
        "you arrive at desk 1 on the desk 1 you see a pencil 1\n"
        "actions\ngo to bed 1\ngo to desk 1\nlook<|assistant|>"
    )


def test_the_end_of_a_response_without_tags_is_its_action():
    for adapter, tail in ((HOME, 30), (webshop.ADAPTER, 20)):
        assert adapter.template("tagged").project("x" * 99).action == "x" * tail


@pytest.mark.parametrize("style", ["tagged", "plain"])
def test_history_is_dropped_before_the_middle_of_the_observation(style):
    words = [f"w{i}x" for i in range(60)]
    history = [
        Turn(observation="first " * 80, action="go to bed 1"),
        Turn(observation="second " * 80, action="go to desk 1"),
    ]
    result = shown(" ".join(words), ACTIONS)
    seen = []
    for limit in range(len(builder(style=style).write(result, history).ids), 0, -7):
        build = builder(style=style, limit=limit)
        try:
            prompt = build.write(result, history)
        except PromptTooLongError:
            break
        text = message(build, prompt)
        assert len(prompt.ids) <= limit
        assert "put some pencil on desk" in text
        whole = prompt.cut != "observation"
        assert (" ".join(words if whole else words[20:40]) in text) == whole
        seen.append((2 - ("first first" in text) - ("second second" in text), CUT_MARK.strip() in text, prompt.cut))
    assert list(dict.fromkeys(seen)) == [
        (0, False, "none"),
        (1, False, "history"),
        (2, False, "history"),
        (2, True, "observation"),
    ]


LOOP = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize("name", ["tools", "strftime_now"])
def test_variables_that_this_package_sets_are_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        PromptBuilder(chat_tokenizer("qwen3"), HOME.template("tagged"), 100, options=TemplateOptions({name: True}))


@pytest.mark.parametrize(
    ("style", "template", "cause"),
    [
        ("tagged", None, "no chat template"),
        ("tagged", LOOP.replace(".content", ".content | upper"), "0 times"),
        ("tagged", LOOP.replace(".content", ".content ~ message.content"), "2 times"),
        ("tagged", "{{ raise_exception('no users here') }}", "no users here"),
        (
            "conversation",
            LOOP.replace("<|im_end|>", "{{ '.' if message.role == 'assistant' else '<|im_end|>' }}"),
            "close a response",
        ),
        ("conversation", LOOP.replace("<|im_start|>{{", "<|im_start|>{{ messages | length }} {{"), "only appends"),
        ("conversation", LOOP.replace("in messages", "in messages | reverse"), "0 times"),
    ],
)
def test_unusable_chat_templates_are_refused(style, template, cause):
    tokenizer = bare_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=cause):
        writer_of(tokenizer, style)


def test_ids_outside_the_vocabulary_are_spelled():
    tokenizer, prompt = chat_tokenizer("qwen2.5"), np.array([1], np.int32)
    ids, size = ids_of(tokenizer, "open drawer"), len(tokenizer)
    texts = ResponseTexts(tokenizer)
    assert texts.text(prompt, 1, np.array([*ids, tokenizer.eos_token_id])) == "open drawer"
    assert texts.text(prompt, 1, np.array([size + 2, *ids, size])) == f"⟨id {size + 2}⟩open drawer⟨id {size}⟩"


@pytest.mark.parametrize("prompt", ["Hello.", "Hello.<think>\n"])
@pytest.mark.parametrize(
    ("reasoning", "rest"), [("look around</think>", "\n\nopen drawer"), ("look around", ""), ("</think>", "go")]
)
def test_reasoning_tokens_are_counted(prompt, reasoning, rest):
    ids = partial(ids_of, tokenizer := chat_tokenizer("qwen3"))
    texts, reasoned = ResponseTexts(tokenizer), ids(reasoning if "<" in prompt else "<think>" + reasoning)
    assert texts.reasoning_tokens(ids(prompt), 1, np.concatenate([reasoned, ids(rest)])) == len(reasoned)
    assert texts.reasoning_tokens(ids("Hello."), 1, ids("open </think>")) == 0

"""Prompt writers of household games, with the results and turns that they write, for tests of prompts."""

import re
from datetime import date

import numpy as np
from chat_tokenizers import published_tokenizer

from trial_envs.tool_env import ToolEnv
from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptContext
from trial_ray.prompts.chat_template import TemplateOptions
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.hermes import HermesBuilder
from trial_ray.prompts.single_turn import PromptBuilder
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.trajectory import Turn

TASK = "put some pencil on desk."
ACTIONS = ("go to desk 1", "look")
DATE = "2020-02-29"
SWITCHES = {"default": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
"""Arguments of chat templates by name."""
KINDS = {"conversation": ConversationBuilder, "tools": ToolConversationBuilder, "hermes": HermesBuilder}


def writer_of(tokenizer, style="tagged", switch="default", limit=100_000, window=2, adapter=ADAPTER, tools=ToolEnv):
    """Create a prompt writer of any style; ``hermes`` writes tools as text."""
    kind, arguments = KINDS.get(style, PromptBuilder), [limit, window, TemplateOptions(SWITCHES[switch], DATE)]
    if style in ("tools", "hermes"):
        style, arguments = "tools", [tools, *arguments]
    return kind(tokenizer, adapter.template(style), *arguments)


def cases_of(names):
    """Return pairs of a chat template and a switch: all switches for the templates that have one."""
    return [
        (name, switch)
        for name in names
        for switch in (SWITCHES if "enable_thinking" in published_tokenizer(name).chat_template else ["default"])
    ]


def shown(observation, actions=ACTIONS, task=TASK):
    return StepResult(observation, task, "", list(actions), won=False, score=0.0)


def message(writer, result, step=1):
    """Return the user's message of a turn."""
    context = PromptContext(result.task, result.observation.strip(), result.admissible_actions, (), step)
    return writer.template.render(context)


def user_messages(writer, results):
    """Return the user's messages of the turns of an episode."""
    return [message(writer, result, step) for step, result in enumerate(results, 1)]


def turn_of(writer, prompt, result, response):
    """Return a turn with the action that the writer reads."""
    ids = np.asarray(response, np.int32)
    projection = writer.read(prompt, ids)
    return Turn(
        prompt.ids,
        ids,
        np.zeros(len(ids), np.float32),
        insert_at=prompt.insert_at,
        observation=result.observation,
        action=projection.action,
        valid=projection.valid,
        actions=projection.actions,
        answers=projection.answers,
        prompt_cut=prompt.cut,
    )


def add_turn(writer, played, result, response):
    """Write the prompt of the next turn and append the turn."""
    played.append(turn_of(writer, writer.write(result, played), result, response))
    return played[-1]


def rendered(tokenizer, messages, switch="default", **arguments):
    """Return a conversation up to the next response, as the chat template itself writes it."""
    arguments |= {"strftime_now": date.fromisoformat(DATE).strftime, "tokenize": False, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(messages, **SWITCHES[switch], **arguments)


def without_reasoning(text):
    """Remove empty reasoning, which templates omit from earlier responses or write differently than in a prompt."""
    return re.sub(r"<think>\s*(</think>\s*)?|<\|channel>thought\n<channel\|>", "", text)


def ids_of(tokenizer, text):
    """Return the token ids of a text alone."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)


def letters(tokenizer, text):
    """Return ids that spell a text letter by letter: a model may sample them, but no tokenizer writes them."""
    return [token for letter in text for token in ids_of(tokenizer, letter)]


def continuation(turn, prompt_ids):
    """Require that a later prompt begins with the ids of a turn, and return the ids that follow them."""
    before = [*turn.prompt_ids, *turn.response_ids]
    assert prompt_ids[: len(before)].tolist() == before
    return prompt_ids[len(before) :]


def controls(tokenizer, ids):
    """Return the added tokens among the ids, reasoning tags excepted."""
    added = {token for token, text in tokenizer.added_tokens_decoder.items() if "think>" not in str(text)}
    return [token for token in ids.tolist() if token in added]

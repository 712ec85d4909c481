"""Conversations with tools: responses call tools in the model's own format, and tool messages contain the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, takewhile
from typing import Any

import numpy as np

from trial_envs.core.projection import Projection
from trial_envs.tool_env import ToolEpisode
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import ConversationPrompt, ToolFormat, ToolTemplate
from trial_ray.errors import ChatTemplateError, ConfigError
from trial_ray.prompts.chat_template import (
    Around,
    ConversationParts,
    TemplateOptions,
    control_tokens,
    controls_within,
    encode_trusted,
    encode_untrusted,
    find_around,
    json_string,
    not_delimited,
    probe,
    render,
    require_beginning,
    require_same,
)
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.tool_calls import ToolSet, parse_response, prepare_parsing, read_call
from trial_ray.prompts.writer import Prompt, answer_texts, context_of, records
from trial_ray.trajectory import Turn

_ARGUMENT = "Sentinel"
"""Argument of the placeholder calls that are rendered; no chat template escapes any of its letters."""


@dataclass(frozen=True)
class AnswerParts:
    """Texts that a chat template writes around the answers of tools.

    Attributes:
        around: text around all answers; the first of its ids is the token that closes a response.
        between: text between each answer and the next.
        suffix_ids: ids between the last answer and the next response.
        end: text that closes the last response; empty if the template writes none.
    """

    around: Around
    between: Sequence[str]
    suffix_ids: list[int]
    end: str

    def encode(self, tokenizer: Any, answers: Sequence[str]) -> list[int]:
        """Return the ids of untrusted answers, and of the text between them and around them up to the special tokens."""
        ids: list[int] = []
        text = self.around.lead_in
        for answer, between in zip(answers, [*self.between, self.around.lead_out], strict=True):
            text += json_string(answer) if self.around.quoted else answer
            opens, closes = controls_within(tokenizer, between)
            if opens < closes:
                ids += encode_untrusted(tokenizer, text + between[:opens]) + encode_trusted(
                    tokenizer, between[opens:closes]
                )
                text = between[closes:]
            else:
                text += between
        return ids + encode_untrusted(tokenizer, text)


def split_answers(
    tokenizer: Any, options: TemplateOptions, tools: Sequence[dict[str, Any]], names: Sequence[str]
) -> AnswerParts:
    """Return the texts around the answers to a response that calls tools.

    Args:
        tokenizer: tokenizer with the chat template.
        options: arguments of the template.
        tools: schemas of all tools.
        names: names of the called tools, which some templates repeat in the answers.

    Raises:
        ChatTemplateError: the template does not write these calls or answers of tools, alters the answers, does not delimit
            them, or closes a response differently if an answer follows.
    """
    call = call_message(*((name, {"argument": _ARGUMENT}) for name in names))
    answers: list[dict[str, Any]] = [{"role": "tool", "name": name} for name in names]
    if len(names) > 1:
        for number, (tool_call, answer) in enumerate(zip(call["tool_calls"], answers, strict=True)):
            tool_call["id"] = answer["tool_call_id"] = str(number)
    messages: list[str | Mapping[str, Any]] = ["system", "user", call, *answers]
    rendered = partial(render, tokenizer, options=options, tools=tools)
    try:
        quoted, pieces = False, rendered(messages)
    except ChatTemplateError as error:
        try:
            quoted, pieces = True, rendered(messages, quoted=True)
        except ChatTemplateError:
            raise error from None
    _, _, called, *between, behind = pieces
    *_, last = rendered(messages[:3], add_generation_prompt=False)
    *_, plain = rendered(["user", "assistant"], add_generation_prompt=False)
    if not called.count(_ARGUMENT) == last.count(_ARGUMENT) == len(names):
        raise ChatTemplateError(
            "The chat template does not write the tool calls of a response. Use a model that was trained to call tools, or "
            "tool_format='hermes'."
        )
    glue, tail = called.rpartition(_ARGUMENT)[2], last.rpartition(_ARGUMENT)[2]
    controls = [tail.rfind(token) for token in control_tokens(tokenizer) if token in tail]
    end = plain if tail.endswith(plain) else tail[max(controls, default=len(tail)) :]
    written = tail[: len(tail) - len(end)]
    if not glue.startswith(written):
        raise ChatTemplateError(
            f"The chat template ends a call with {written!r}, but with {glue[: len(written)]!r} if an answer follows, so a longer "
            "conversation does not start with the shorter one. Use a template that only appends."
        )
    glue = glue.removeprefix(written)
    if not glue.startswith(tuple(control_tokens(tokenizer))):
        raise not_delimited("a response", glue)
    around, rest = find_around(tokenizer, glue, behind, "the answer of a tool")
    around = replace(around, quoted=quoted)
    parts = AnswerParts(around, between, encode_trusted(tokenizer, rest), end)
    probes = [probe(number) for number in reversed(range(len(names)))]
    shown = [json_string(text) if quoted else text for text in probes]
    whole = glue + "".join(chain.from_iterable(zip(shown, [*between, behind], strict=True)))
    require_same(tokenizer, whole, [*around.ids, *parts.encode(tokenizer, probes), *parts.suffix_ids])
    return parts


def call_message(*calls: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message that calls tools, in the format of ``apply_chat_template``.

    Args:
        calls: name and arguments of each call.
    """
    functions = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


class ToolConversationBuilder(ConversationBuilder):
    """Writes conversations with tools: role and task, the tools and the first observation, then calls and answers.

    The chat template determines the position of the tools' schemas. Prompt k+1 is prompt k, the ids of response k, and the
    chat template's text around the answers of the tools that were called. If a response calls no tool, the answer is a message
    of the tool whose name is first in alphabetical order. If the chat template cannot write several calls and their answers, a
    response with several calls is refused.

    If a prompt would exceed the token limit, the conversation starts again, with the last ``history_window`` turns as text in
    the user's message.

    Args:
        tokenizer: a ``transformers`` tokenizer; its ``response_template`` is set if missing.
        template: template that writes the messages.
        tools: class with the tools as its public methods.
        settings: as in :class:`~trial_ray.prompts.writer.PromptWriter`.

    Raises:
        ChatTemplateError: as in the base class; or the chat template does not support tools, or the ``response_template``
            misreads its calls.
        ConfigError: as in :class:`~trial_ray.prompts.tool_calls.ToolSet`.
        MissingDependencyError: the tokenizer has no ``response_template``, and TRL is not installed.
    """

    tool_format: ToolFormat | None = None

    def __init__(self, tokenizer: Any, template: ConversationPrompt, tools: type[ToolEpisode], *settings: Any) -> None:
        self.tools = ToolSet(tools)
        prepare_parsing(tokenizer, self.tool_format)
        super().__init__(tokenizer, template, *settings)
        if isinstance(template, ToolTemplate) and not self.tools.several:
            self.template = replace(template, one_call=True)

    def _split(self, options: TemplateOptions) -> None:
        tokenizer, schemas = self._tokenizer, self.tools.schemas
        head, opens, suffix = render(tokenizer, ["system", "user"], options, tools=schemas)
        system, between = find_around(tokenizer, head, opens, "the system message")
        first, rest = find_around(tokenizer, between, suffix, "the user's message")
        self._answers = lru_cache(1024)(partial(split_answers, tokenizer, options, schemas))
        answer, *_ = [self._answers((name,)) for name in self.tools.names]
        # In some templates, nothing closes a response except the opening of the tool's answer.
        self._stop = answer.end.strip() or self.responses.decode(answer.around.ids[:1])
        ends = frozenset(encode_trusted(tokenizer, self._stop))
        self._options, self._opening = options, suffix
        self._parts = ConversationParts(system, first, answer.around, encode_trusted(tokenizer, rest), ends)
        require_beginning(tokenizer, self._parts, head, between, suffix)
        one, *_, other = self.tools.names * 2
        self._require_parsing(one)
        try:
            for names in ((one, other), (one, other, other)):
                self._answers(names)
                self._require_parsing(*names)
        except ChatTemplateError:
            self.tools.several = False

    def _require_parsing(self, *names: str) -> None:
        """Require that the ``response_template`` parses calls of the tools ``names`` as the chat template writes them."""
        expected: list[Any] = [(name, {"argument": _ARGUMENT}) for name in names]
        response = self.response_text(call_message(*expected))
        try:
            calls = [read_call(call) for call in parse_response(self._tokenizer, response, self._opening)["tool_calls"]]
        except ValueError as error:
            calls = [("", error)]
        if calls != expected:
            raise ChatTemplateError(
                f"The tokenizer's response_template parses {calls} from {response!r}, but its chat template writes that text for "
                f"{expected}. Set the response_template of this chat template."
            )

    def response_text(self, message: Mapping[str, Any]) -> str:
        """Return a response as the chat template writes it after a prompt, with its end token.

        Args:
            message: message of the assistant with ``content``, and ``tool_calls`` or ``reasoning_content`` if it has them.
        """
        calls = message.get("tool_calls") or [{}]
        name = read_call(calls[0])[0]
        end = self._answers((name if name in self.tools.names else self.tools.names[0],)).end
        *_, written = render(
            self._tokenizer,
            ["system", "user", message],
            self._options,
            add_generation_prompt=False,
            tools=self.tools.schemas,
        )
        # Remove the beginning that the rendered text shares with the end of a prompt. The two may differ: if a prompt ends with
        # <think>, the template may write another text in its place before a response without reasoning.
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(written, self._opening, strict=False)))
        return written[shared:].removesuffix(end) + self._stop

    def encode_message(self, message: Mapping[str, Any]) -> np.ndarray:
        """Return the ids of :meth:`response_text`, int32 ``[y]``.

        Raises:
            ValueError: the message contains the text of the end token.
        """
        ids = np.asarray(encode_trusted(self._tokenizer, self.response_text(message)), np.int32)
        if np.isin(ids, list(self._parts.end_ids)).sum() != 1:
            raise ValueError("it spells the token that ends a response")
        return ids

    def encode_action(self, prompt: Prompt, action: str) -> np.ndarray:
        """Return the ids of the response that calls the tool for an action, end token included: int32 ``[y]``.

        Raises:
            ConfigError: no tool has this action, or no call in this chat template can express it, for example because it
                contains the text of the end token.
        """
        call = self.tools.call_of(action)
        response = "" if call is None else self.response_text(call_message(call))
        ids = np.asarray(encode_trusted(self._tokenizer, response), np.int32)
        if np.isin(ids, list(self._parts.end_ids)).sum() != 1 or self.read(prompt, ids) != Projection(action, True):
            raise ConfigError(
                f"The action {action!r:.200} cannot be expressed as a call of {', '.join(self.tools.names)} in this chat template. "
                "Add a tool for it to the environment adapter, or choose another response_style."
            )
        return ids

    def read(self, prompt: Prompt, response_ids: np.ndarray) -> Projection:
        """Read the actions of the tools that a response calls; see :meth:`ToolSet.project`."""
        try:
            return self.tools.project(self._parsed(prompt.ids, prompt.insert_at, response_ids))
        except ValueError as error:
            return self.tools.refuse(f"The response could not be read ({error!s:.200}).")

    def _parsed(self, prompt_ids: np.ndarray, insert_at: int, response_ids: np.ndarray) -> list[Any]:
        """Return the calls of a response."""
        # The prefix begins after the last message, so that an observation cannot imitate the opening of a response.
        prefix = self.responses.decode(prompt_ids[insert_at:].tolist())
        whole = self.responses.whole(response_ids)
        return list(parse_response(self._tokenizer, whole, prefix, self.tools.schemas)["tool_calls"])

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """Write the prompt of the next decision; the system message and the last message are never truncated."""
        if turns:
            last = turns[-1]
            answer, texts = self._answers(self._called(last)), answer_texts(self.template, result, turns)
            texts.append(self._text(result, turns, 0))
            if sum(map(len, texts)) <= self._max_characters:
                message = answer.encode(self._tokenizer, texts)
                ids = np.concatenate(
                    [last.prompt_ids, self._answered(last, answer.around), message, answer.suffix_ids]
                ).astype(np.int32)
                if len(ids) <= self.max_prompt_tokens:
                    return Prompt(ids, len(ids) - len(answer.suffix_ids), "none")
        beginning = self._beginning(result.task)
        for num_shown in range(min(self.history_window, len(turns)), -1, -1):
            message = self._parts.first.encode(self._tokenizer, self._text(result, turns, num_shown))
            ids = np.concatenate([beginning, message, self._parts.suffix_ids])
            if len(ids) <= self.max_prompt_tokens:
                return self._prompt(ids, len(turns))
        raise self._message_too_long(result, len(ids))

    def _text(self, result: StepResult, turns: Sequence[Turn], num_shown: int) -> str:
        """Return the message of the next turn, preceded by the last ``num_shown`` turns as text."""
        past = records(turns[len(turns) - num_shown :])
        message = self.template.render(context_of(result, turns, past)).strip()
        if not num_shown and len(message) > self._max_characters:
            raise self._message_too_long(result, None)
        return message

    def _called(self, turn: Turn) -> tuple[str, ...]:
        """Return the names of the tools whose messages answer a turn, one per answer."""
        known, number = self.tools.names, turn.num_steps
        try:
            calls = self._parsed(turn.prompt_ids, turn.insert_at, turn.response_ids)
        except ValueError:
            calls = []
        names = [name if name in known else known[0] for name, _ in map(read_call, calls)]
        return (*names[:number], *known[:1] * (number - len(names)))

"""Prompts for the chat requests of an agent program, which calls the policy through a chat API.

A prompt reuses the ids of an earlier request and its answer where possible; otherwise the chat template renders the messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from trial_envs.core.projection import Projection
from trial_envs.program import ChatCall, answer_action
from trial_ray.adapters.guarded import StepResult
from trial_ray.adapters.templates import PromptTemplate, ToolFormat
from trial_ray.errors import ChatTemplateError, PromptTooLongError
from trial_ray.prompts.chat_template import (
    TemplateOptions,
    control_tokens,
    encode_trusted,
    encode_untrusted,
    not_delimited,
    require_same,
    write_messages,
)
from trial_ray.prompts.hermes import hermes_messages
from trial_ray.prompts.tool_calls import parse_response, prepare_parsing, read_call
from trial_ray.prompts.writer import Message, Prompt, PromptWriter
from trial_ray.trajectory import PromptCut, Turn

_MARK = "Sentinel7kQ9w"
"""Placeholder that locates a text in the rendered conversation; no chat template alters it."""
_SPELLED = re.compile(r"Spelled7kQ9w(\d+)w")
"""Placeholder that replaces the text of a control token in a message while the conversation is rendered."""
_MAX_CLOSING = 8
"""Maximum number of tokens with which a chat template closes a response."""
_EXAMPLE: list[Message] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


class CallWriter(PromptWriter):
    """Writes the prompts for an agent program's chat requests, which may have any messages and tools.

    If a request begins with the messages and the answer of an earlier one, its prompt is the earlier prompt, the sampled ids of
    the answer, and the ids of the messages that follow. If the program has changed the answer, the earlier prompt is kept up to
    the answer. Any other prompt is rendered by the chat template. If a message contains the text of a control token, that text
    is encoded as ordinary text.

    If the program drops the reasoning of earlier answers, and the chat template would drop this reasoning as well, the prompt
    still contains the answers as sampled, with their reasoning. If the chat template would keep it, the prompt keeps the ids
    before the first answer whose reasoning is missing, and the messages from this answer on are rendered again.

    Args:
        tokenizer: as in :class:`~trial_ray.prompts.writer.PromptWriter`. If the style is ``"tools"`` and the tokenizer has no
            ``response_template``, it is set.
        template: template of the program's environment; its style is ``"tools"`` if requests may offer tools.
        settings: as in :class:`~trial_ray.prompts.writer.PromptWriter`.
        tool_format: ``"hermes"`` to write tools, calls and results as text, for chat templates that do not support tools;
            ``None`` to let the chat template write them.
        shortens: if a request is too long, drop its earliest messages, except system messages, instead of raising an error; at
            most ``history_window`` answers are then kept.

    Raises:
        ChatTemplateError: as in the base class.
        MissingDependencyError: the style is ``"tools"``, the tokenizer has no ``response_template``, and TRL is not installed.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: PromptTemplate,
        *settings: Any,
        tool_format: ToolFormat | None = None,
        shortens: bool = False,
    ) -> None:
        self._tool_format, self._shortens = tool_format, shortens
        if template.style == "tools":
            prepare_parsing(tokenizer, tool_format)
        super().__init__(tokenizer, template, *settings)

    def _split(self, options: TemplateOptions) -> None:
        tokenizer = self._tokenizer
        self._options, self._controls = options, control_tokens(tokenizer)
        longest_first = sorted(self._controls, key=len, reverse=True)
        # The group makes split() return the control tokens, too.
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._in_parts, self._has_system = False, True
        written = self._rendered(_EXAMPLE, [])
        if any(message["content"] not in written for message in _EXAMPLE):
            self._in_parts = True
            written = self._rendered(_EXAMPLE, [])
        require_same(tokenizer, written, self._ids(written))
        try:
            self._rendered([{"role": "system", "content": "zero"}, *_EXAMPLE], [])
        except ChatTemplateError:
            self._has_system = False
        answered: Message = {"role": "assistant", "content": _MARK}
        self._end = self._text_after([_EXAMPLE[0], answered], 1, [], add_generation_prompt=False)
        # In some templates, nothing closes a response except the opening of the next message.
        closings = [self._end or self._text_after([_EXAMPLE[0], answered, _EXAMPLE[2]], 1, [])]
        if self.template.style == "tools":
            closings.append(self._end_of(self._call_example()) or closings[0])
        tokens = [match[0] for text in closings if (match := self._control.search(text))]
        if not tokens:
            raise not_delimited("a response", closings[0])
        self._closing = "".join(tokens)

    def _call_example(self) -> str:
        """Render an example answer that calls a tool, and return the rendered text after the call's argument."""
        function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
        call = {"id": "c00000000", "type": "function", "function": {"name": "look", "arguments": {}}}
        messages = [_EXAMPLE[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
        rest = self._text_after(messages, 1, [{"type": "function", "function": function}], add_generation_prompt=False)
        if not rest:
            raise ChatTemplateError(
                "The chat template does not write the tool calls of a response. Use a model that was trained to call tools, or "
                "prompt_style='conversation'."
            )
        return rest

    def _end_of(self, text: str) -> str:
        """Return the part of a rendered ``text`` that closes the answer at its end.

        It is the text that closes answers without tool calls or, if ``text`` does not end with that, the part of ``text`` from
        its last control token on.
        """
        controls = [*self._control.finditer(text)]
        return self._end if text.endswith(self._end) or not controls else text[controls[-1].start() :]

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens with which the chat template closes a response."""
        return frozenset(encode_trusted(self._tokenizer, self._closing))

    def write(self, result: StepResult, turns: Sequence[Turn]) -> Prompt:
        """Write the prompt for an agent program's chat request, ``result.call``.

        Raises:
            PromptTooLongError: the prompt exceeds the limit, even after shortening if that is enabled.
            ChatTemplateError: the chat template cannot write the messages, or the request offers tools but the style is not
                ``"tools"``.
        """
        call = result.call
        assert call is not None
        if call.tools and self.template.style != "tools":
            raise ChatTemplateError("The call offers tools, which needs .env_runners(prompt_style='tools').")
        *longer, shortest = [call, *self._shortened(call)] if self._shortens else [call]
        for candidate in longer:
            with suppress(PromptTooLongError):
                return self._written(candidate, turns, "none" if candidate is call else "history")
        return self._written(shortest, turns, "none" if shortest is call else "history")

    def _shortened(self, call: ChatCall) -> list[ChatCall]:
        """Return shorter versions of a request, the longest first.

        Each version has the request's leading system messages, and all messages from one of its user messages to the end. The
        first message after the system messages is dropped in every version.
        """
        roles = [message["role"] for message in call.messages]
        first = next((index for index, role in enumerate(roles) if role != "system"), 0)
        starts = [
            index
            for index, role in enumerate(roles)
            if role == "user" and index > first and roles[index:].count("assistant") <= self.history_window
        ]
        return [replace(call, messages=call.messages[:first] + call.messages[start:], parent=None) for start in starts]

    def _written(self, call: ChatCall, turns: Sequence[Turn], cut: PromptCut) -> Prompt:
        if sum(len(str(message["content"])) for message in call.messages) > self._max_characters:
            raise self._too_long("the messages of the call", None)
        known, text = self._reusable(call, turns) or ([], self._rendered(call.messages, call.tools))
        suffix = self._from_control(self._text_after(call.messages, len(call.messages) - 1, call.tools))
        if not suffix or not text.endswith(suffix):
            raise not_delimited("the last message", suffix)
        ids = np.asarray([*known, *self._ids(text)], np.int32)
        if len(ids) > self.max_prompt_tokens:
            raise self._too_long("the messages of the call", len(ids))
        return Prompt(ids, len(ids) - len(self._ids(suffix)), cut, call.tools)

    def read(self, prompt: Prompt, response_ids: np.ndarray) -> Projection:
        """Return a response as the JSON answer to a chat request; the answer is invalid if the response is empty or unparsable."""
        projection = super().read(prompt, response_ids)
        if self.template.style != "tools":
            return projection
        prefix = self.responses.decode(prompt.ids[prompt.insert_at :].tolist())
        try:
            parsed = parse_response(self._tokenizer, self.responses.whole(response_ids), prefix, prompt.tools)
        except ValueError:
            return replace(projection, valid=False)
        text, calls = str(parsed.get("content") or "").strip(), [*map(read_call, parsed["tool_calls"])]
        if not all(isinstance(arguments, dict) for _, arguments in calls):
            return replace(projection, valid=False)
        reasoning = str(parsed.get("reasoning_content") or parsed.get("thinking") or "").strip()
        return Projection(answer_action(text, *calls, reasoning=reasoning), bool(text or calls))

    def _reusable(self, call: ChatCall, turns: Sequence[Turn]) -> tuple[list[int], str] | None:
        """Return the ids that a prompt can reuse from an earlier turn, and the rendered text that follows; else ``None``."""
        if call.parent is None:
            return None
        turn, answered = turns[call.parent], call.answered
        first = next(iter(call.unreasoned), None)
        if first is not None and self._keeps_reasoning(call):
            answered = False
            while len(_call(turn).messages) > first and (parent := _call(turn).parent) is not None:
                turn = turns[parent]
            if len(_call(turn).messages) != first:
                return None
        messages, length = call.messages, len(_call(turn).messages)
        if not answered:
            texts = [self._text_after(some, length - 1, call.tools) for some in (messages, messages[:length])]
            rest, rest_alone = map(self._from_control, texts)
            ends = [text.removesuffix(part) for text, part in zip(texts, (rest, rest_alone), strict=True)]
            # ``ends`` has the text from the message to the next control token, with and without the messages that follow. The
            # two texts differ if the template writes text of later messages before this control token.
            return (turn.prompt_ids[: turn.insert_at].tolist(), rest) if rest and ends[0] == ends[1] else None
        alone = self._text_after(messages[: length + 1], length, call.tools, add_generation_prompt=False)
        rest_of_answer = alone[: len(alone) - len(self._end_of(alone))]
        rest = self._text_after(messages, length, call.tools)
        if not rest.startswith(rest_of_answer) or not self._control.match(rest, len(rest_of_answer)):
            return None
        rest = rest.removeprefix(rest_of_answer)
        known, rest_ids = [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()], self._ids(rest)
        # The ids of a response that was not truncated already end with the tokens that close it.
        lengths = range(min(len(rest_ids), _MAX_CLOSING), -1, -1)
        written = next(number for number in lengths if known[len(known) - number :] == rest_ids[:number])
        return known[: len(known) - written], rest

    def _keeps_reasoning(self, call: ChatCall) -> bool:
        """Return whether the chat template would write the reasoning that the agent program has dropped from earlier answers."""
        messages = [dict(message) for message in call.messages]
        for index in call.unreasoned:
            messages[index]["reasoning_content"] = _MARK
        return _MARK in self._rendered(messages, call.tools)

    def _text_after(self, messages: Sequence[Message], index: int, tools: Sequence[Any], **further: Any) -> str:
        """Return the rendered text after one message; empty if the chat template does not write the message.

        A message ends after the last argument of its last call, or after its text.
        """
        marked = [{**messages[index], "content": _MARK}]
        if calls := messages[index].get("tool_calls"):
            function = {**calls[-1]["function"], "arguments": {"argument": _MARK}}
            marked.insert(0, {**messages[index], "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]})
        for message in marked:
            written = self._rendered([*messages[:index], message, *messages[index + 1 :]], tools, **further)
            if _MARK in written:
                return written.rpartition(_MARK)[2]
        return ""

    def _from_control(self, text: str) -> str:
        """Return a text from its first control token on; empty without one."""
        match = self._control.search(text)
        return text[match.start() :] if match else ""

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any], **further: Any) -> str:
        """Return the rendered conversation; placeholders replace the texts of control tokens in messages and tools."""
        shown, offered = [self._escaped(message) for message in messages], self._escaped([*tools])
        if self._tool_format == "hermes":
            shown, offered = hermes_messages(shown, offered, has_system=self._has_system), []
        if self._in_parts:
            shown = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in shown]
        return write_messages(self._tokenizer, shown, self._options, tools=offered or None, **further)

    def _escaped(self, value: Any) -> Any:
        """Return a JSON value in which placeholders replace the texts of control tokens."""
        if isinstance(value, str):
            return self._control.sub(lambda match: f"Spelled7kQ9w{self._controls.index(match[0])}w", value)
        if isinstance(value, Mapping):
            return {self._escaped(name): self._escaped(entry) for name, entry in value.items()}
        return [self._escaped(entry) for entry in value] if isinstance(value, list) else value

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a rendered text; only the chat template's own control tokens are encoded as control tokens."""
        ids: list[int] = []
        for index, part in enumerate(self._control.split(text)):
            if index % 2:
                ids += encode_trusted(self._tokenizer, part)
            else:
                ids += encode_untrusted(self._tokenizer, _SPELLED.sub(self._spelled, part))
        return ids

    def _spelled(self, match: re.Match[str]) -> str:
        number = int(match[1])
        return self._controls[number] if number < len(self._controls) else match[0]


def _call(turn: Turn) -> ChatCall:
    assert turn.call is not None
    return turn.call

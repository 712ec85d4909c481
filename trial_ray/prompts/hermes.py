"""The Hermes format of tools, for chat templates that do not support tools: schemas, calls and answers are written as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from trial_ray.adapters.guarded import StepResult
from trial_ray.prompts.conversation import ConversationBuilder
from trial_ray.prompts.tool_calls import read_call
from trial_ray.prompts.tool_conversation import ToolConversationBuilder
from trial_ray.prompts.writer import Message, answer_texts
from trial_ray.trajectory import Turn

_TOOLS = """The functions that you can call are described as JSON between <tools> and </tools>:
<tools>
{}
</tools>

Write each call as a JSON object with the name and the arguments of the function, between <tool_call> and </tool_call>:
<tool_call>
{{"name": "<function>", "arguments": {{"<argument>": "<value>"}}}}
</tool_call>"""


def hermes_messages(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[Message]:
    """Write tools as text: the first message describes the tools, and tool calls and their results are text.

    Args:
        messages: messages of a chat API, with calls and messages of the role ``tool``.
        tools: schemas of the tools.
        has_system: whether the chat template has system messages; if not, the user's first message describes the tools.
    """
    written: list[Message] = []
    for are_answers, run in groupby(messages, lambda message: message["role"] == "tool"):
        if are_answers:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in run]
            written.append({"role": "user", "content": "\n".join(texts)})
            continue
        for message in run:
            content = "\n".join(filter(None, [message["content"], *_call_texts(message)]))
            written.append(
                {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
            )
    if tools:
        if has_system and written[0]["role"] != "system":
            written.insert(0, {"role": "system", "content": ""})
        first = written[0]["content"]
        texts = [first, _described(tools)] if has_system else [_described(tools), first]
        written[0] = {**written[0], "content": "\n\n".join(filter(None, texts))}
    return written


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    return _TOOLS.format("\n".join(json.dumps(schema, ensure_ascii=False) for schema in tools))


def _call_texts(message: Mapping[str, Any]) -> list[str]:
    calls = (
        {"name": name, "arguments": arguments} for name, arguments in map(read_call, message.get("tool_calls") or [])
    )
    return [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]


class HermesBuilder(ToolConversationBuilder):
    """Writes conversations with tools for chat templates that support conversations, but not tools.

    The tools' schemas are at the end of the system message or, if the chat template does not delimit a system message, after
    role and task in the user's first message. Later user messages have the answers to the calls of the previous response. If a
    prompt would exceed the token limit, the conversation starts again, as in :class:`ConversationBuilder`.

    Takes the same arguments and raises the same errors as the base class.
    """

    tool_format = "hermes"

    # Tools are text here, so this class reads the chat template and writes prompts as conversations without tools do.
    _split = ConversationBuilder._split
    write = ConversationBuilder.write

    def _system(self, task: str) -> str:
        return f"{super()._system(task)}\n\n{_described(self.tools.schemas)}".strip()

    def _shown(self, result: StepResult, turns: Sequence[Turn]) -> str:
        texts = [*answer_texts(self.template, result, turns), super()._shown(result, turns)]
        return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts) if turns else texts[-1]

    def response_text(self, message: Mapping[str, Any]) -> str:
        """Return the text of a response with its tool calls and its end token; see the base class."""
        reasoning = message.get("reasoning_content", "")
        opened = self.responses.opening(np.asarray(self._parts.suffix_ids), 0)
        parts = [
            f"<think>\n{reasoning}\n</think>\n" if reasoning or opened else "",
            message["content"],
            *_call_texts(message),
        ]
        return "\n".join(filter(None, parts)).removeprefix(opened) + self.responses.decode([min(self.end_ids)])

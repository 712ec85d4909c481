"""OpenAI's Chat Completions API, to and from which the other chat APIs are translated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]


def chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the request ``body``, which needs no translation."""
    return dict(body)


def answer(completion: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the chat completion, which needs no translation."""
    return dict(completion)


def events(completion: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a finished completion as the server-sent events of a streamed answer: pairs of an empty event name and the data.

    The data are chunks with the role, the texts, the tool calls, the finish reason and, if requested, the usage.
    """
    head = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(index: int, delta: Message, reason: str | None = None, logprobs: Any = None) -> tuple[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return "", {**head, "choices": [choice]}

    for choice in completion["choices"]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        for name in ("reasoning_content", "content"):
            if message.get(name):
                yield chunk(index, {name: message[name]}, logprobs=choice["logprobs"] if name == "content" else None)
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, choice["finish_reason"])
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": completion["usage"]}
    yield "", "[DONE]"


def error(status: int, message: str, code: str | None) -> dict[str, Any]:
    """Return the body of an error response of the Chat Completions API with the given HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def read_messages(values: Any) -> list[Message]:
    """Return messages as chat templates expect them: contents are strings, and the arguments of tool calls are objects.

    The role ``developer`` becomes ``system``. A message with the result of a tool gets the tool's name from the tool call.

    Raises:
        ValueError: there is no message, or a message has an unknown role, content that is not text, or a tool call without a
            function.
    """
    if not isinstance(values, list) or not values:
        raise ValueError(f"Expected a list of messages, got {values!r:.200}.")
    messages, names = [], dict[str, str]()
    for value in values:
        try:
            message = _read_message(value)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"Expected a message of the chat API, got {json.dumps(value):.200} ({error}).") from error
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and "name" not in message:
            message["name"] = names.get(message.get("tool_call_id", ""), "")
        messages.append(message)
    return messages


def _read_message(value: Any) -> Message:
    if not isinstance(value, dict) or (role := value.get("role")) not in ROLES:
        raise ValueError(f"Expected a message of the roles {', '.join(ROLES)}, got {json.dumps(value):.200}.")
    content = value.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in TEXTS for part in content):
        content = "".join(part.get(part["type"]) or "" for part in content)
    calls = value.get("tool_calls") or []
    if not isinstance(content, str | None) or not all(isinstance(call, dict) and "function" in call for call in calls):
        raise ValueError(f"Expected texts and calls of functions in a message, got {json.dumps(value):.200}.")
    message: Message = {"role": ROLES[role], "content": content or ""}
    if role == "assistant":
        if reasoning := value.get("reasoning_content") or value.get("reasoning"):
            message["reasoning_content"] = str(reasoning)
        if calls:
            message["tool_calls"] = [_read_call(call) for call in calls]
    message |= {name: value[name] for name in ("name", "tool_call_id") if isinstance(value.get(name), str)}
    return message


def _read_call(call: Mapping[str, Any]) -> Message:
    arguments = call["function"].get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):  # Arguments that are not JSON stay a string, which chat templates write unchanged.
            arguments = json.loads(arguments)
    function = {"name": str(call["function"].get("name", "")), "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": function}


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Accepted role -> role in chat templates."""
TEXTS = ("text", "refusal")
"""Types of content parts that contain text."""

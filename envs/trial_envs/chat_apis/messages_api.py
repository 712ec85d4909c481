"""Anthropic's Messages API (``/v1/messages``), translated into chat completions and back.

If a request repeats the content blocks of an earlier answer unchanged, they are translated to the same assistant message again.
Only spaces in the JSON of a tool call's arguments may differ, because the Messages API represents the arguments as an object.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from trial_envs.chat_apis.fields import (
    Event,
    Fields,
    JsonObject,
    function_of,
    refuses_malformed,
    renamed,
    require,
    require_known,
    text_of,
)

SAME = ("max_tokens", "model", "stream", "temperature", "top_p")
"""Fields of Messages API requests that have the same name in chat completion requests."""
KNOWN = (
    *SAME,
    *("messages", "output_config", "stop_sequences", "system", "tool_choice", "tools"),
    # The following fields are accepted but have no effect; the policy's chat template decides whether the policy reasons.
    *("cache_control", "inference_geo", "metadata", "service_tier", "speed", "thinking"),
    *("user_profile_id", "workspace_id"),
)
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""Possible types of content blocks by role."""
BILLING = "x-anthropic-billing-header"
"""Beginning of a system block that Claude Code sends. The block is dropped, because it differs in every request: with it,
requests would share no prefix."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY = {"text": "", "thinking": "", "signature": "", "input": {}}
"""Fields of a content block that are streamed, with their values in the event ``content_block_start``."""
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@refuses_malformed
def chat_request(body: Fields) -> JsonObject:
    """Translate a request to the Messages API to a chat completion request.

    Raises:
        ValueError: the request is malformed, or needs a feature that text-only chat completions do not have.
    """
    require_known(body, KNOWN, "the request")
    require_known(body.get("output_config") or {}, ("effort",), "output_config")
    messages = body["messages"]
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, which the policy cannot continue: expected a user's")
    if system := body.get("system"):
        messages = [{"role": "system", "content": system}, *messages]
    chat = renamed(body, *SAME, stop="stop_sequences")
    chat["messages"] = [chat_message for message in messages for chat_message in _messages(message)]
    if tools := body.get("tools"):
        chat["tools"] = [
            function_of(tool, "custom", "name", "description", "strict", parameters="input_schema") for tool in tools
        ]
    if choice := body.get("tool_choice"):
        chat["tool_choice"] = TOOL_CHOICES.get(choice["type"]) or function_of(choice, "tool", "name")
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    return chat


def _messages(message: Fields) -> Iterator[JsonObject]:
    """Translate an Anthropic message to chat messages: one for each tool result, then one for the other content, if any."""
    role, content = message["role"], message["content"]
    blocks: dict[str, list[Fields]] = {}
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        require(block["type"], BLOCKS[role], f"the type of a block of the {role}")
        if role != "system" or not block["text"].startswith(BILLING):
            blocks.setdefault(block["type"], []).append(block)
    for block in blocks.get("tool_result", ()):
        text = text_of(block.get("content") or "")
        text = f"Error: {text}" if block.get("is_error") else text
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
    chat = {"role": role, "content": "".join(block["text"] for block in blocks["text"]) if "text" in blocks else None}
    if "thinking" in blocks:
        chat["reasoning_content"] = "".join(block["thinking"] for block in blocks["thinking"])
    if "tool_use" in blocks:
        chat["tool_calls"] = [_call(block) for block in blocks["tool_use"]]
    if role == "assistant" or "text" in blocks:
        yield chat


def _call(block: Fields) -> JsonObject:
    arguments = json.dumps(block["input"])
    return {"id": block["id"], **function_of({**block, "arguments": arguments}, "tool_use", "name", "arguments")}


def answer(completion: Fields, body: Fields) -> JsonObject:
    """Translate a chat completion with one choice to a message, the answer to the request ``body``.

    The arguments of tool calls must be JSON objects.
    """
    choice, usage = completion["choices"][0], completion["usage"]
    return {
        "id": completion["id"],
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": list(_content(completion["id"], choice["message"])),
        "stop_reason": STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def _content(completion_id: str, message: Fields) -> Iterator[JsonObject]:
    if reasoning := message.get("reasoning_content"):
        # Clients may drop a thinking block without a signature, so the completion's id is used as the signature.
        yield {"type": "thinking", "thinking": reasoning, "signature": completion_id}
    if (text := message.get("content")) is not None:
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def events(completion: Fields, body: Fields) -> Iterator[Event]:
    """Yield the names and data of the server-sent events that stream a chat completion as a message."""
    for name, data in _events(answer(completion, body)):
        yield name, {"type": name, **data}


def _events(message: JsonObject) -> Iterator[Event]:
    yield "message_start", {"message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        streamed = [field for field in block if field in EMPTY]
        empty = {field: EMPTY[field] for field in streamed}
        yield "content_block_start", {"index": index, "content_block": {**block, **empty}}
        for field in streamed:
            delta = {"type": f"{field}_delta", field: block[field]}
            if field == "input":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block[field])}
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    yield "message_delta", {"delta": renamed(message, "stop_reason"), "usage": message["usage"]}
    yield "message_stop", {}


def error(status: int, message: str, code: str | None) -> JsonObject:
    """Return the body of an error response of the Messages API with the given HTTP status."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": code} if code else None
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}}

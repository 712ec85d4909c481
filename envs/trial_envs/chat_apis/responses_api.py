"""OpenAI's Responses API (``/v1/responses``), translated into chat completions and back.

Responses are not stored, so each request contains its whole history. If a request repeats the output items of an earlier
answer, unchanged and in their order, they are translated to the same assistant message again.
"""

from __future__ import annotations

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

SAME = ("model", "parallel_tool_calls", "stream", "temperature", "top_logprobs", "top_p")
"""Fields of Responses API requests that have the same name in chat completion requests."""
KNOWN = (
    *SAME,
    *("include", "input", "instructions", "max_output_tokens", "text", "tool_choice", "tools"),
    # The following fields are accepted but have no effect: nothing is stored or truncated, there are no built-in tools, and the
    # policy's chat template decides whether the policy reasons.
    *("max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning", "safety_identifier", "service_tier", "store", "stream_options", "truncation", "user"),
)
ITEMS = ("function_call", "function_call_output", "message", "reasoning")


@refuses_malformed
def chat_request(body: Fields) -> JsonObject:
    """Translate a request to the Responses API to a chat completion request.

    Raises:
        ValueError: the request is malformed, or needs a feature that text-only chat completions do not have.
    """
    require_known(body, KNOWN, "the request")
    if form := (body.get("text") or {}).get("format"):
        require(form["type"], ("text",), "the type of text.format")
    chat = renamed(body, *SAME, max_tokens="max_output_tokens")
    system, items = body.get("instructions"), body["input"]
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        _add(chat["messages"], item)
    if tools := body.get("tools"):
        chat["tools"] = [function_of(tool, "function", "name", "description", "parameters", "strict") for tool in tools]
    if choice := body.get("tool_choice"):
        chat["tool_choice"] = choice if isinstance(choice, str) else function_of(choice, "function", "name")
    if "message.output_text.logprobs" in (body.get("include") or ()):
        chat["logprobs"] = True
    return chat


def _add(messages: list[JsonObject], item: Fields) -> None:
    """Translate an item of the request's input and add it to the chat messages."""
    kind, role = item.get("type", "message"), item.get("role")
    require(kind, ITEMS, "the type of an item of the input")
    if kind == "function_call":
        call = {"id": item["call_id"], **function_of(item, kind, "name", "arguments")}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text_of(item["output"])})
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise ValueError("a reasoning item has encrypted_content, but the reasoning is possible as a text only")
        text = text_of(item.get("content") or item["summary"])
        _assistant(messages, "reasoning_content", "content", "tool_calls")["reasoning_content"] = text
    elif role == "assistant":
        _assistant(messages, "content", "tool_calls")["content"] = text_of(item["content"])
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": text_of(item["content"])})


def _assistant(messages: list[JsonObject], *parts: str) -> JsonObject:
    """Return the assistant message to which an item of the request's input is added.

    This is the last message, or a new message if the last message has another role or already has a field named in ``parts``.
    """
    last = messages[-1] if messages else {"role": None}
    if last["role"] != "assistant" or any(last.get(part) is not None for part in parts):
        messages.append(last := {"role": "assistant", "content": None})
    return last


def answer(completion: Fields, body: Fields) -> JsonObject:
    """Translate a chat completion with one choice to a response, the answer to the request ``body``."""
    usage, is_cut = completion["usage"], completion["choices"][0]["finish_reason"] == "length"
    status = "incomplete" if is_cut else "completed"
    return {
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **renamed(body, "instructions", "parallel_tool_calls", "tool_choice", "tools"),
        **renamed(completion, "id", "model", created_at="created"),
        "object": "response",
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [{**item, "status": status} for item in _items(completion)],
        "usage": {
            **renamed(usage, "total_tokens", input_tokens="prompt_tokens", output_tokens="completion_tokens"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _items(completion: Fields) -> Iterator[JsonObject]:
    choice = completion["choices"][0]
    message = choice["message"]
    if reasoning := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        yield {"id": f"rs_{completion['id']}", "type": "reasoning", "summary": [], "content": [part]}
    if (text := message.get("content")) is not None:
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        yield {"id": f"msg_{completion['id']}", "type": "message", "role": "assistant", "content": [part]}
    for call in message.get("tool_calls") or ():
        yield {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"], **call["function"]}


def events(completion: Fields, body: Fields) -> Iterator[Event]:
    """Yield the names and data of the server-sent events that stream a chat completion as a response."""
    for number, (event, data) in enumerate(_events(answer(completion, body))):
        yield f"response.{event}", {"type": f"response.{event}", "sequence_number": number, **data}


def _events(response: JsonObject) -> Iterator[Event]:
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "created", {"response": begun}
    for index, item in enumerate(response["output"]):
        location: JsonObject = {"output_index": index, "item_id": item["id"]}
        empty: JsonObject = {"content": []} if "content" in item else {"arguments": ""}
        yield "output_item.added", {**location, "item": {**item, "status": "in_progress", **empty}}
        for part in item.get("content", ()):
            kind, text = part["type"], part["text"]
            location |= {"content_index": 0, "logprobs": part.get("logprobs", [])}
            yield "content_part.added", {**location, "part": {**part, "text": ""}}
            yield f"{kind}.delta", {**location, "delta": text}
            yield f"{kind}.done", {**location, "text": text}
            yield "content_part.done", {**location, "part": part}
        if arguments := item.get("arguments"):
            yield "function_call_arguments.delta", {**location, "delta": arguments}
            yield "function_call_arguments.done", {**location, "arguments": arguments}
        yield "output_item.done", {**location, "item": item}
    yield response["status"], {"response": response}


def error(status: int, message: str, code: str | None) -> JsonObject:
    """Return the body of an error response of the Responses API with the given HTTP status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

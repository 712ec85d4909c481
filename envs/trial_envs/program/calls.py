"""A program's chat requests in one episode: waiting requests, and answered requests that later requests continue."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trial_envs.chat_apis.chat_completions import Message, read_messages

MODEL = "policy"
MAX_CHOICES = 16
"""Maximum number of answers (``n``) to one request."""
MAX_LATE = 100
"""If this many calls are refused after the turn limit, the episode ends, because the program seems to ignore the errors."""
TOO_LONG, TURN_LIMIT = "context_length_exceeded", "turn_limit_exceeded"
"""Error codes of calls that are refused because of a limit of the episode, not because of a mistake of the program."""
SAMPLING = ("temperature", "top_p", "stop", "seed")
"""Sampling settings of a request. They are recorded; whether the policy samples with them is a setting of the trainer."""
USED = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stream", "stream_options"),
    *("logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "response_format", "logit_bias", *SAMPLING),
}
"""Fields of a request that are supported; the names of other fields are recorded in :attr:`ChatCall.ignored`."""


class RefusedCallError(Exception):
    """A request that the policy does not answer.

    Attributes:
        status: HTTP status of the answer.
        code: error code in the chat API; ``None`` if the request itself is wrong.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A program's call, that is, its chat request to the policy; ``info["call"]`` has these attributes as a dict.

    Calls form a forest: a call that begins with the messages of an earlier call is its child.

    Attributes:
        messages: all messages, as chat templates expect them.
        tools: JSON schemas of the tools that the policy may call.
        parent: index of the turn (the earlier answered call) with whose messages this call begins; ``None`` if there is none.
        num_known: number of leading messages that equal the parent's messages, plus 1 if the parent's answer follows unchanged.
        answered: whether the parent's answer follows unchanged.
        unreasoned: indices in ``messages`` of answers that have ``reasoning_content`` in the parent, but not in this request.
        max_tokens: the request's limit on the tokens of the answer; ``None`` if it has none.
        sampling: the request's sampling settings, ``temperature``, ``top_p``, ``stop`` and ``seed``.
        logprobs: whether the answer must include log-probabilities.
        ignored: names of the request's fields that have no effect.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    parent: int | None = None
    num_known: int = 0
    answered: bool = False
    unreasoned: list[int] = field(default_factory=list)
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    ignored: list[str] = field(default_factory=list)

    def follows(self, turn: int) -> bool:
        """Return whether this chat request continues turn ``turn``, its :attr:`parent`.

        It does if the turn's messages are followed, in this request, by the turn's answer, unchanged or edited.
        """
        if turn != self.parent:
            return False
        return self.answered or [message["role"] for message in self.messages[self.num_known :][:1]] == ["assistant"]

    def place(self, turn: int) -> str:
        """Describe how this chat request relates to earlier turns.

        The text is empty for an episode's first request, and if the request repeats the previous turn and its answer unchanged.

        Args:
            turn: index of the turn that answers this request.
        """
        if self.parent is None:
            return "another conversation" if turn else ""
        if self.answered:
            return "" if self.parent == turn - 1 else f"continues turn {self.parent + 1}"
        return f"{'changes the answer of' if self.follows(self.parent) else 'begins as'} turn {self.parent + 1}"

    @property
    def shown(self) -> list[Message]:
        """The messages after the last assistant message, without system messages."""
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [message for message in self.messages[max(answers, default=-1) + 1 :] if message["role"] != "system"]


@dataclass(eq=False)
class Waiting:
    """A call that waits for its answer."""

    body: Mapping[str, Any]
    messages: list[Message]
    answer: asyncio.Future[dict[str, Any]]


class Calls:
    """The waiting and the answered calls of one episode. All methods must be called in the same event loop.

    A request for ``n`` answers is ``n`` calls. If a client abandons a request before the policy has answered all of its calls,
    the request is cancelled: its calls are removed from the queue, and the answer to its current call, if any, is dropped. If
    the policy has already answered, the answer is kept, and the next identical request gets it without a new turn.

    Attributes:
        counts: numbers of calls that were ``received``, ``answered``, ``cancelled`` and ``refused``; ``received`` is
            the sum of the other three and of the number of waiting calls.
        refusal: message of the first refusal for a reason other than a limit of the episode; empty if there was none.
        unserved: the last refusal; ``None`` if a call was answered after it, or no call was refused.
        closed: error with which further calls are refused; ``None`` while calls are accepted.
        exhausted: set when the program has made :data:`MAX_LATE` calls after :meth:`close`.
        current: the call that :meth:`next` returned and that is not answered yet; ``None`` if there is none.
    """

    def __init__(self) -> None:
        self.counts = Counter(received=0, answered=0, cancelled=0, refused=0)
        self.refusal = ""
        self.unserved: RefusedCallError | None = None
        self.closed: RefusedCallError | None = None
        self.exhausted = asyncio.Event()
        self.current: Waiting | None = None
        self._turns: list[tuple[list[Message], int, list[dict[str, Any]]]] = []
        self._queue: deque[Waiting] = deque()
        self._arrived = asyncio.Event()
        self._kept: dict[str, dict[str, Any]] = {}
        self._late = 0

    # -- methods that serve the program's requests ---------------------------------------------------------------------

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until the policy has answered a request, and return the chat completion.

        Raises:
            RefusedCallError: the request cannot be answered, or the episode has ended.
        """
        if (key := _key(body)) in self._kept:
            return self._kept.pop(key)
        try:
            number, messages = self._check(body)
        except (ValueError, RefusedCallError) as error:
            raise self.reject(error) from error
        self.counts["received"] += number
        waiting = [Waiting(body, messages, asyncio.get_running_loop().create_future()) for _ in range(number)]
        self._queue += waiting
        self._arrived.set()
        try:
            answers = await asyncio.gather(*(call.answer for call in waiting))
        except asyncio.CancelledError:
            futures = [call.answer for call in waiting]
            if all(future.done() and not future.cancelled() and future.exception() is None for future in futures):
                self._kept[key] = _completion(body, [future.result() for future in futures])
            else:
                self._cancel_waiting(waiting)
            raise
        except RefusedCallError:
            self._cancel_waiting(waiting)
            raise
        return _completion(body, answers)

    def reject(self, error: ValueError | RefusedCallError) -> RefusedCallError:
        """Count a request that is refused before it enters the queue; return the error."""
        self.counts["received"] += 1
        return self._refused(error if isinstance(error, RefusedCallError) else RefusedCallError(str(error)))

    def keep(self, body: Mapping[str, Any], completion: dict[str, Any]) -> None:
        """Keep a completion that did not reach the client; it then answers a repetition of the request."""
        self._kept[_key(body)] = completion

    def close(self, reason: RefusedCallError) -> None:
        """Refuse all waiting and all later calls with the error ``reason``."""
        self.closed = reason
        for waiting in [*self._queue, *([self.current] if self.current else [])]:
            if waiting.answer.done():
                self.counts["cancelled"] += 1
            else:
                waiting.answer.set_exception(self._refused(reason))
        self._queue.clear()
        self.current = None

    def _check(self, body: Mapping[str, Any]) -> tuple[int, list[Message]]:
        """Check a request; return its number of answers and its messages."""
        if self.closed is not None:
            self._late += 1
            if self._late >= MAX_LATE:
                self.exhausted.set()
            raise self.closed
        messages = read_messages(body.get("messages"))
        for name in ("max_tokens", "max_completion_tokens"):
            limit = body.get(name)
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise ValueError(f"Expected {name} to be a whole number of at least 1, got {limit!r:.80}.")
        number = 1 if body.get("n") is None else body["n"]
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_CHOICES:
            raise ValueError(f"Expected n to be a whole number from 1 to {MAX_CHOICES}, got {number!r:.80}.")
        form = body.get("response_format") or {"type": "text"}
        if form != {"type": "text"} or body.get("logit_bias"):
            raise ValueError(
                "The request has response_format or logit_bias, which the policy's engine does not enforce. Describe the form of "
                "the answer in a message, or offer a tool."
            )
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) and "function" in tool for tool in tools):
            raise ValueError(f"Expected tools that are functions, got {json.dumps(tools):.200}.")
        return number, messages

    def _refused(self, error: RefusedCallError) -> RefusedCallError:
        self.counts["refused"] += 1
        if error.code is None:
            self.refusal = self.refusal or str(error)
        self.unserved = error
        return error

    def _cancel_waiting(self, waiting: Sequence[Waiting]) -> None:
        for call in waiting:
            if call in self._queue:
                self._queue.remove(call)
                self.counts["cancelled"] += 1
            call.answer.cancel()

    # -- methods with which the environment reads and answers calls ----------------------------------------------------

    async def next(self) -> ChatCall:
        """Wait for the next call, make it the current call, and return it."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        self.current = self._queue.popleft()
        return self._make_call(self.current)

    def is_waiting(self) -> bool:
        """Return whether the current call still waits for its answer."""
        return self.current is not None and not self.current.answer.done()

    def answer(self, call: ChatCall, answer: dict[str, Any]) -> bool:
        """Answer the current call; return ``False`` if the program has abandoned the call."""
        assert self.current is not None
        current, self.current = self.current, None
        if current.answer.done():
            self.counts["cancelled"] += 1
            return False
        tool_calls = answer["message"].get("tool_calls") or []
        if current.body.get("parallel_tool_calls") is False and tool_calls[1:]:
            answer = {**answer, "message": {**answer["message"], "tool_calls": tool_calls[:1]}}
        for number, tool_call in enumerate(tool_calls):
            # Some chat templates accept only ids of nine letters and digits.
            tool_call["id"] = f"c{len(self._turns):05d}{number:03d}"
        self._turns.append(([*call.messages, *read_messages([answer["message"]])], len(call.messages), call.tools))
        self.counts["answered"] += 1
        self.unserved = None
        current.answer.set_result(answer)
        return True

    def refuse(self, error: RefusedCallError) -> None:
        """Refuse the current call with an error."""
        assert self.current is not None
        current, self.current = self.current, None
        if current.answer.done():
            self.counts["cancelled"] += 1
        else:
            current.answer.set_exception(self._refused(error))

    def _make_call(self, waiting: Waiting) -> ChatCall:
        """Make a :class:`ChatCall` from a waiting request.

        Candidates for its parent are the answered calls that have the same tools and with whose messages the request begins.
        The parent is the candidate that shares the most messages with the request, counting the candidate's answer.
        """
        body, messages = waiting.body, waiting.messages
        tools = [] if body.get("tool_choice") == "none" else [dict(tool) for tool in body.get("tools") or []]
        parent, num_known, answered, is_same = None, 0, False, False
        for index, (known, length, offered) in enumerate(self._turns):
            shared = _num_shared(known, messages) if offered == tools else 0
            same = known[:shared] == messages[:shared]  # _num_shared() ignores ids of tool calls and missing reasoning.
            if shared >= length and (shared, same) >= (num_known, is_same):
                parent, num_known, answered, is_same = index, shared, shared > length, same
        known = [] if parent is None else self._turns[parent][0][:num_known]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        return ChatCall(
            messages,
            tools,
            parent,
            num_known,
            answered,
            unreasoned=[
                index
                for index, message in enumerate(known)
                if "reasoning_content" in message and "reasoning_content" not in messages[index]
            ],
            max_tokens=limit,
            sampling={name: body[name] for name in SAMPLING if body.get(name) is not None},
            logprobs=bool(body.get("logprobs")),
            ignored=sorted(name for name in body.keys() - USED if body[name] is not None),
        )


def _num_shared(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """Return the number of leading messages that two lists share, compared by :func:`_same`."""
    pairs = enumerate(zip(known, messages, strict=False))
    return next((index for index, pair in pairs if not _same(*pair)), min(len(known), len(messages)))


def _same(known: Message, message: Message) -> bool:
    """Return whether two messages have the same role, text, tool calls and reasoning.

    Ids of tool calls may differ, and ``message`` may lack the reasoning of ``known``.
    """
    reasoning = message.get("reasoning_content")
    return (
        (known["role"], known["content"]) == (message["role"], message["content"])
        and reasoning in (None, known.get("reasoning_content"))
        and _functions(known) == _functions(message)
    )


def _functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _key(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def _completion(body: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answers to one request as a chat completion, which counts the prompt's tokens once."""
    choices = [
        {
            "index": index,
            "logprobs": None,
            **{name: answer[name] for name in ("message", "finish_reason")},
            **_logprobs(answer),
        }
        for index, answer in enumerate(answers)
    ]
    usages = [answer.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0} for answer in answers]
    prompt, sampled = usages[0]["prompt_tokens"], sum(usage["completion_tokens"] for usage in usages)
    return {
        "id": f"chatcmpl-{answers[0].get('id', '')}",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model") or MODEL,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }


def _logprobs(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprobs": {"content": answer["logprobs"], "refusal": None}} if answer.get("logprobs") else {}

"""Programs that call a chat model, as text environments: the new message of a call is the observation, its answer the action.

An agent that was written for a chat API, with its own loop and tools, can therefore be trained without changes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from inspect import Parameter, signature
from numbers import Real
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from trial_envs.core.extras import install_command
from trial_envs.core.text_env import Outcome, TextEnv
from trial_envs.errors import MissingPackageError, UnknownSplitError, UnknownTaskError
from trial_envs.tool_env import ToolEpisode

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

Answer = TypeVar("Answer")
Message = dict[str, Any]
Result = float | Mapping[str, Any]

MODEL = "policy"
SYSTEM = {"role": "system", "content": "Use the tools."}
"""First message of a conversation if the prompt has no system message."""
FIELDS = {"model", "messages", "stream", "n"}
"""Accepted fields of a request. Sampling settings are not among them: the caller of the environment sets these."""
FIELDS_WITH_TOOLS = FIELDS | {"tools", "tool_choice", "parallel_tool_calls"}


def program_tools(functions: Sequence[Callable[..., Any]]) -> type[ToolEpisode]:
    """Return the tools of a program for ``EnvironmentAdapter(tools=...)``; an action is a tool call or a text, as JSON.

    Args:
        functions: functions with type hints and docstrings, from which the schemas are made; the program itself calls them.
    """
    calls = {function.__name__: _calling(function) for function in functions}
    # The class name lists the tools, because the record of a run contains this name.
    return type(f"program_tools({', '.join(calls)})", (ToolEpisode,), {"_say": staticmethod(_said), **calls})


def _calling(function: Callable[..., Any]) -> Callable[..., str]:
    @wraps(function)
    def tool(self: Any, *values: Any, **arguments: Any) -> str:
        bound = signature(function).bind(*values, **arguments).arguments
        command: str = self._take(json.dumps({"name": function.__name__, "arguments": bound}))
        return command

    own = signature(function)
    if "self" in own.parameters:
        raise TypeError(f"expected a function or a method of an object, got {function.__qualname__} of a class")
    me = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    tool.__signature__ = own.replace(parameters=[me, *own.parameters.values()])  # type: ignore[attr-defined]
    return tool


def _said(text: str) -> str:
    return json.dumps({"content": text})


def tool_program(
    factory: Callable[[], Any],
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    reward: Callable[[Any], float] = methodcaller("get_reward"),
) -> dict[str, Any]:
    """Return keyword arguments of :class:`ProgramEnv` that play environments with tools of their own, as TRL plays them.

    An episode makes an environment, calls ``reset(**row)``, whose text follows the row's prompt, and calls the environment's tools
    until the policy answers without a call. An exception of a tool is its result. Task ids are ``split/number`` of a row.

    Args:
        factory: makes an environment (TRL's ``environment_factory``). Its public methods, with type hints and docstrings, are the
            tools, except ``reset`` and ``get_reward``; ``async`` ones are awaited.
        rows: rows of a data set by split, each with the messages of a system (optional) and a user under ``"prompt"``.
        reward: called with the environment at the end; awaited if it is ``async``.
    """
    made = factory()
    # Search the class, not the object: a property may need a reset first.
    names = [name for name, _ in inspect.getmembers(type(made), inspect.isfunction) if name[0] != "_"]
    tools = [_without_object(getattr(made, name)) for name in names if name not in ("reset", "get_reward")]
    offered: Any = [{"type": "function", "function": {"name": tool.__name__}} for tool in tools]

    async def run(task: str, chat: AsyncOpenAI) -> Result:
        split, _, number = task.rpartition("/")
        row = rows[split][int(number)]
        env = factory()
        *before, user = row["prompt"]
        asked = _text(user["content"])
        begin = asked + _text(env.reset(**row) or "")
        # The system message contains the task, because a conversation over the limit restarts with this message.
        system = {**SYSTEM, "content": f"{SYSTEM['content']}\n\n{asked}"}
        messages: Any = [*(before or [system]), {**user, "content": begin}]
        while True:
            completion = await chat.chat.completions.create(model=MODEL, messages=messages, tools=offered)
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                rated: Any = reward(env)
                return float(await rated if inspect.isawaitable(rated) else rated)
            call: Any = answer.tool_calls[0]
            try:
                result = getattr(env, call.function.name)(**json.loads(call.function.arguments))
                result = await result if inspect.isawaitable(result) else result
            except Exception as error:  # The policy sees the error of a tool and may correct its call.
                result = {"error": str(error)}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})

    tasks = {split: [f"{split}/{number}" for number in range(len(split_rows))] for split, split_rows in rows.items()}
    return {"run": run, "tasks": tasks, "tools": tools}


def _without_object(method: Any) -> Callable[..., Any]:
    """Return a function with a method's name, signature and docstring, which can be sent without the object."""

    @wraps(getattr(method, "__func__", method))
    def tool(**arguments: Any) -> None: ...

    tool.__signature__ = signature(method)  # type: ignore[attr-defined]
    return tool


class ProgramEnv(TextEnv):
    """Runs a program as an environment: the next action answers each call of ``chat.completions.create``.

    A conversation starts with a system message, which becomes ``info["task"]``, and a user message, the observation. A later call
    repeats the conversation, with the last answer as the assistant's message, and adds one user message, the next observation.
    It may also start another conversation, for example with a summary; ``info["past_turns"]`` is then 0. All other calls are
    rejected, because their turns could not be trained as they were sampled. With ``tools``, an answer may be a tool call, and the
    next message is then the tool's; no message may follow an answer without a call.

    The program has its own event loop, which runs only during the program's turn. Run a program that may hang in a separate
    process.

    Args:
        run: ``async def run(task_id, chat)`` with an ``openai.AsyncOpenAI`` that sends every call to the policy, one at a time. It
            returns the reward, or a dict with the ``"reward"`` and, optionally, ``"won"`` (default: a reward of 1 or more),
            ``"score"`` in [0, 1] (default: the clipped reward), ``"rewards"`` (components by name, to be logged) and ``"outcome"``
            (observation after the policy's last answer; default: the reward). Its exceptions end the episode and are re-raised.
        tasks: task ids by split.
        split: the split that ``reset`` draws tasks from.
        max_turns: maximum number of calls per episode; the episode is then truncated, and the program is cancelled by the next
            ``reset`` or ``close``.
        render_mode: see :class:`~trial_envs.core.text_env.TextEnv`.
        tools: functions that the program's calls offer to the policy, as for :func:`program_tools`; actions are then JSON.

    Raises:
        MissingPackageError: the package ``openai`` is not installed.
        UnknownSplitError: ``tasks`` has no such split.
    """

    keeps_case = True

    def __init__(
        self,
        run: Callable[[str, AsyncOpenAI], Awaitable[Result]],
        tasks: Mapping[str, Sequence[str]],
        split: str = "train",
        max_turns: int = 50,
        render_mode: str | None = None,
        tools: Sequence[Callable[..., Any]] = (),
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        self._run, self._tasks = run, tasks
        self._tools = sorted(tool.__name__ for tool in tools)
        self.tasks()
        self._loop = asyncio.new_event_loop()
        # The event loop of this thread may already be running.
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._chat = _client(self._respond)
        self._program: asyncio.Task[Result] | None = None
        self._conversation: list[Message] = []
        self._call: asyncio.Future[str] | None = None
        self._turn_lock = asyncio.Lock()
        self._answer: asyncio.Future[Message] | None = None
        self._rewards: Mapping[str, float] = {}

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split, as passed to the constructor.

        Raises:
            UnknownSplitError: the split does not exist.
        """
        name = self.split if split is None else split
        if name not in self._tasks:
            raise UnknownSplitError(f"expected one of the program's splits, {', '.join(self._tasks)}, got {name!r}")
        return self._tasks[name]

    def family(self, task_id: str) -> str:
        """Return an empty string: programs have no task families."""
        return ""

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        if not any(task_id in tasks for tasks in self._tasks.values()):
            raise UnknownTaskError(f"the program has no task {task_id!r}")
        self._in_loop(self._begin(task_id))
        outcome = self._in_loop(self._next())
        if outcome.done:
            raise RuntimeError("the program ended before its first call of the model")
        return self._conversation[0]["content"], outcome

    def _advance(self, action: str) -> Outcome:
        return self._in_loop(self._next(action))

    def _free(self) -> None:
        if self._loop.is_running():  # An interrupt ended the wait for the program.
            waiting = asyncio.all_tasks(self._loop)
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in waiting])
        self._in_loop(self._cancel())
        self._in_loop(self._chat.close())
        self._thread.shutdown()
        self._loop.close()

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        return {
            **super()._info(outcome),
            "rewards": dict(self._rewards),
            "past_turns": len(self._conversation) // 2 - 1,
        }

    def _in_loop(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        return self._thread.submit(self._loop.run_until_complete, coroutine).result()

    # -- in the program's event loop -----------------------------------------------------------------------------------

    async def _begin(self, task_id: str) -> None:
        await self._cancel()
        await self._chat.close()  # The last program may have closed its client already.
        self._chat = _client(self._respond)
        self._conversation, self._answer, self._rewards = [], None, {}
        self._call = self._loop.create_future()
        self._program = self._loop.create_task(_result(self._run(task_id, self._chat)))

    async def _cancel(self) -> None:
        """End the program of the last episode and all tasks that it started."""
        started = asyncio.all_tasks() - {asyncio.current_task()}
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)

    async def _next(self, action: str | None = None) -> Outcome:
        """Answer the program's call, and run the program until its next call or its end."""
        assert self._program is not None
        assert self._call is not None
        if action is not None:
            assert self._answer is not None
            answer = self._message(action)
            self._conversation.append(_plain(answer))
            self._call = self._loop.create_future()
            if not self._answer.done():  # The program may have cancelled the call.
                self._answer.set_result(answer)
        either: set[asyncio.Future[Any]] = {self._program, self._call}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._program.done():
            return Outcome(self._call.result(), ())
        returned = self._program.result()
        result: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {"reward": returned}
        reward = result.get("reward")
        if not isinstance(reward, Real):
            raise TypeError(
                f"expected the reward, or a dict with it under 'reward', from the program, got {returned!r:.200}"
            )
        self._rewards = result.get("rewards", {})
        return Outcome(
            observation=result.get("outcome", f"The reward is {float(reward):g}."),
            admissible_actions=(),
            reward=float(reward),
            score=result.get("score", min(1.0, max(0.0, float(reward)))),
            won=result.get("won", float(reward) >= 1),
            done=True,
        )

    def _message(self, action: str) -> Message:
        """Convert an action to the policy's message."""
        try:
            said = json.loads(action) if self._tools else {"content": action}
        except ValueError as error:
            raise ValueError(
                f"expected an action of program_tools({', '.join(self._tools)}), got {action!r:.200}: give the environment's "
                "adapter the same tools"
            ) from error
        if "content" in said:
            return {"role": "assistant", "content": said["content"]}
        function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
        call = {"id": f"call_{len(self._conversation)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    async def _respond(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request of the program's client."""
        import httpx2

        try:
            message = await self._ask(request.url.path, json.loads(request.content or b"{}"))
        except ValueError as error:
            return httpx2.Response(400, json={"error": {"message": str(error)}})
        reason = "tool_calls" if "tool_calls" in message else "stop"
        completion = {
            "id": f"{self._task_id}/{len(self._actions)}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        }
        return httpx2.Response(200, json=completion)

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Message:
        if not path.endswith("/chat/completions"):
            raise ValueError(f"{path}: the policy answers chat.completions.create only")
        if others := sorted(body.keys() - (FIELDS_WITH_TOOLS if self._tools else FIELDS)):
            raise ValueError(
                f"expected messages only, got {', '.join(others)} too: the settings of the run decide how responses are sampled, "
                "and the environment's tools what is offered"
            )
        if (offered := sorted(tool["function"]["name"] for tool in body.get("tools", ()))) != self._tools:
            raise ValueError(f"expected the tools {', '.join(self._tools)}, got {', '.join(offered) or 'none'}")
        if body.get("stream") or body.get("n", 1) != 1:
            raise ValueError("expected a call for one whole answer, got stream or n")
        if (choice := body.get("tool_choice", "auto")) != "auto":
            raise ValueError(f"expected tool_choice='auto', got {choice!r}: the policy decides whether it calls a tool")
        messages = [_plain(message) for message in body.get("messages", ())]
        async with self._turn_lock:
            return await self._turn(messages)

    async def _turn(self, messages: list[Message]) -> Message:
        """Return the policy's answer to the messages of its next turn."""
        if self._call is None or self._call.done():
            raise ValueError("expected no other call while one is not answered, got one after a call was cancelled")
        known, roles = self._conversation, [message["role"] for message in messages]
        follows = "tool" if known and known[-1].get("calls") else "" if self._tools else "user"
        starts = roles == ["system", "user"]
        if not starts and not (known and messages[: len(known)] == known and roles[len(known) :] == [follows]):
            last = f"the last call, its answer and one message of the {follows}, or " if known and follows else ""
            changed = [(old, new) for old, new in zip(known, messages, strict=False) if old != new]
            which = "".join(f"; the message {old!s:.200} is now {new!s:.200}" for old, new in changed[:1])
            raise ValueError(f"expected messages of {last}system and user, got {roles}{which}")
        self._conversation, self._instruction = messages, messages[0]["content"]
        self._answer = self._loop.create_future()
        self._call.set_result(messages[-1]["content"])
        return await self._answer


def _client(respond: Callable[[httpx2.Request], Coroutine[None, None, httpx2.Response]]) -> AsyncOpenAI:
    """Return a client with requests that are answered by a coroutine function in this process."""
    try:
        import httpx2
        import openai
    except ImportError as error:
        raise MissingPackageError(
            f"a program's client needs the package openai; install it with: {install_command('endpoint')}"
        ) from error
    transport = httpx2.MockTransport(respond)
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://policy/v1",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(transport=transport),
    )


def _plain(message: Mapping[str, Any]) -> Message:
    """Return the role, text and calls of a message.

    Raises:
        ValueError: the content is not a text, or a call is not a function call.
    """
    content, calls = _text(message.get("content")), message.get("tool_calls") or []
    if calls and content is None:
        content = ""
    if not isinstance(content, str) or any("function" not in call for call in calls):
        raise ValueError(f"expected a message with a text as its content, got {json.dumps(message):.200}")
    plain = {"role": message.get("role"), "content": content}
    functions = [(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return {**plain, "calls": functions} if calls else plain


def _text(content: Any) -> Any:
    """Return the text of a list of text parts; any other content as it is."""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


async def _result(running: Awaitable[Result]) -> Result:
    return await running

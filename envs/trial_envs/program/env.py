"""Programs that call a chat model, as text environments: a chat request is an observation, and its answer is the action.

An agent that was written for a chat API, with its own loop, tools and sub-agents, can therefore be trained without changes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from numbers import Real
from typing import TYPE_CHECKING, Any

from trial_envs.core.text_env import Outcome, TextEnv
from trial_envs.errors import UnknownSplitError, UnknownTaskError
from trial_envs.program.calls import TOO_LONG, TURN_LIMIT, Calls, ChatCall, RefusedCallError
from trial_envs.program.gateway import Gateway, LoopThread, cancel_others

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Result = float | Mapping[str, Any]


def answer_action(text: str, *calls: tuple[str, Mapping[str, Any]], reasoning: str = "") -> str:
    """Return an action that answers a call with a text and with tool calls, each given by its name and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return json.dumps({"message": message, "finish_reason": "tool_calls" if calls else "stop"})


def refusal_action(message: str, code: str | None = None) -> str:
    """Return an action that refuses a call; the program's client then raises an error with this message and code."""
    return json.dumps({"error": {"message": message, "code": code}})


class ProgramEnv(TextEnv):
    """Runs a program as an environment: each action answers one call, that is, one chat request of the program.

    A program may send any messages and tools, and make several calls at once, which are then shown one after the other.
    ``info["call"]`` has the attributes of the call (:class:`~trial_envs.program.calls.ChatCall`), and the observation is the
    text of its new messages. An action is the JSON of an answer, see :func:`answer_action` and :func:`refusal_action`.
    ``info["calls"]`` has the numbers of calls so far that were received, answered, cancelled and refused. ``info["answered"]`` is
    ``False`` after an action that did not answer the program's call, because the client had abandoned the call or the action
    refused it.

    The program runs in one thread, and the queue of its calls in another; both threads continue while the policy samples. Run a
    program that may hang in a separate process.

    Args:
        run: the program, ``async def run(task_id, chat)``; ``chat`` is an ``openai.AsyncOpenAI`` that sends every request to
            the policy. The function returns the reward, or a dict with the ``"reward"`` and, optionally, ``"won"`` (default:
            a reward of 1 or more), ``"score"`` in [0, 1] (default: the clipped reward), ``"rewards"`` (components by name, to
            be logged) and ``"outcome"`` (observation after the policy's last answer; default: the reward). Its exceptions end
            the episode and are re-raised.
        tasks: task ids by split.
        split: the split that ``reset`` draws tasks from.
        max_turns: maximum number of calls per episode. The next call gets an error with the code ``turn_limit_exceeded``, and
            the episode is truncated; the program can still return a result, which is the episode's result.
        render_mode: see :class:`~trial_envs.core.text_env.TextEnv`.

    Raises:
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
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        self._run, self._tasks = run, tasks
        self.tasks()
        self._loops: tuple[LoopThread, LoopThread] | None = None
        self._calls = Calls()
        self._program: asyncio.Future[Result] | None = None
        self._call: ChatCall | None = None
        self._answered = True
        self._rewards: Mapping[str, float] = {}

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split, as passed to the constructor.

        Raises:
            UnknownSplitError: the split does not exist.
        """
        name = self.split if split is None else split
        if name not in self._tasks:
            raise UnknownSplitError(f"Expected one of the program's splits, {', '.join(self._tasks)}, got {name!r}.")
        return self._tasks[name]

    def family(self, task_id: str) -> str:
        """Return an empty string: programs have no task families."""
        return ""

    @property
    def call_counts(self) -> dict[str, int]:
        """Numbers of calls of this episode so far, as in ``info["calls"]``."""
        return dict(self._calls.counts)

    def is_waiting(self) -> bool:
        """Return whether the program still waits for the answer to the call in ``info["call"]``."""
        return self._calls.is_waiting()

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        if not any(task_id in tasks for tasks in self._tasks.values()):
            raise UnknownTaskError(f"The program has no task {task_id!r}.")
        # Cancel the previous episode's program and calls. If the program blocks its thread, use new threads.
        if self._loops is None or not all(loop.cancel_tasks() for loop in self._loops):
            self._loops = LoopThread("program"), LoopThread("calls")
        program, calls = self._loops
        self._calls, self._rewards, self._answered = Calls(), {}, True
        started = program.start(_run_program(self._run, task_id, Gateway(self._calls, calls)))
        outcome = calls.start(self._begin(started)).result()
        if self._call is None:
            raise RuntimeError("The program ended before its first call of the policy.")
        first = self._call.messages[0]
        return first["content"], outcome

    def _advance(self, action: str) -> Outcome:
        assert self._loops is not None
        return self._loops[1].start(self._answer(_read_action(action))).result()

    def _free(self) -> None:
        for loop in self._loops or ():
            loop.close()

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        return {
            **super()._info(outcome),
            "rewards": dict(self._rewards),
            "call": None if self._call is None else asdict(self._call),
            "calls": self.call_counts,
            "refusal": self._calls.refusal,
            "answered": self._answered,
        }

    # -- methods that run in the event loop of the calls ---------------------------------------------------------------

    async def _begin(self, program: Future[Result]) -> Outcome:
        self._program = asyncio.wrap_future(program)
        return await self._next()

    async def _answer(self, action: Mapping[str, Any]) -> Outcome:
        """Answer or refuse the program's call; then wait until the program makes another call or ends."""
        assert self._call is not None
        if error := action.get("error"):
            self._calls.refuse(RefusedCallError(error["message"], code=error.get("code")))
            self._answered = False
        else:
            self._answered = self._calls.answer(self._call, {"id": f"{self._task_id}/{len(self._actions)}", **action})
        if len(self._actions) + 1 >= self.max_turns:
            self._calls.close(RefusedCallError(f"The episode may have {self.max_turns} calls.", code=TURN_LIMIT))
        return await self._next()

    async def _next(self) -> Outcome:
        """Wait until the program makes a call, ends, or has made too many calls after the turn limit; return the outcome."""
        assert self._program is not None
        called = asyncio.ensure_future(self._calls.next())
        exhausted = asyncio.ensure_future(self._calls.exhausted.wait())
        events: set[asyncio.Future[Any]] = {self._program, called, exhausted}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        exhausted.cancel()
        self._call = called.result() if called.done() and not self._program.done() else None
        if self._call is not None:
            return Outcome("\n\n".join(message["content"] for message in self._call.shown), ())
        called.cancel()
        error = self._program.exception() if self._program.done() else None
        limit = getattr(self._calls.unserved or error, "code", None) in (TOO_LONG, TURN_LIMIT)
        if not self._program.done() or (limit and error is not None):
            return Outcome("The episode reached a limit.", (), truncated=True)
        return self._outcome(self._result(), truncated=limit)

    def _result(self) -> Mapping[str, Any]:
        """Return the result of the program as a dict.

        Raises:
            RuntimeError: the program ended after its call was refused for a reason other than a limit of the episode.
            TypeError: the program returned no reward.
            Exception: any exception of the program.
        """
        assert self._program is not None
        unserved, error = self._calls.unserved, self._program.exception()
        if unserved is not None and unserved.code is None:
            raise RuntimeError(f"The program ended after its call was refused: {unserved}") from error
        returned = self._program.result()
        result: Mapping[str, Any] = returned if isinstance(returned, Mapping) else {"reward": returned}
        if not isinstance(result.get("reward"), Real):
            raise TypeError(
                f"Expected the reward, or a dict with it under 'reward', from the program, got {returned!r:.200}."
            )
        return result

    def _outcome(self, result: Mapping[str, Any], *, truncated: bool) -> Outcome:
        reward = float(result["reward"])
        self._rewards = result.get("rewards", {})
        return Outcome(
            observation=result.get("outcome", f"The reward is {reward:g}."),
            admissible_actions=(),
            reward=reward,
            score=result.get("score", min(1.0, max(0.0, reward))),
            won=result.get("won", reward >= 1),
            done=not truncated,
            truncated=truncated,
        )


def _read_action(action: str) -> Mapping[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(action)
        if not ("error" in answer or isinstance(answer["message"], dict)):
            raise TypeError
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"Expected the JSON of an answer, as trial_envs.program.answer_action makes it, got {action!r:.200}."
        ) from error
    return answer


async def _run_program(run: Callable[[str, AsyncOpenAI], Awaitable[Result]], task_id: str, gateway: Gateway) -> Result:
    try:
        async with gateway.client() as chat:
            result = await run(task_id, chat)
    except Exception:  # CancelledError needs no handling: LoopThread.cancel_tasks() cancels all tasks.
        await cancel_others()
        raise
    await cancel_others()  # Asyncio tasks that the program left running must not call the policy.
    return result

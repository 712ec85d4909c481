"""Gateway between an agent program and the policy.

The gateway answers the program's HTTP requests. The path of a request selects the chat API, and the policy answers chat requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from trial_envs.chat_apis import chat_completions, messages_api, responses_api
from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError
from trial_envs.program.calls import MODEL, Calls, RefusedCallError

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

Result = TypeVar("Result")

APIS: Mapping[str, ModuleType] = {
    "/chat/completions": chat_completions,
    "/responses": responses_api,
    "/messages": messages_api,
}
JOIN_TIMEOUT_S = 10.0
"""Maximum number of seconds to wait until the tasks or the thread of an event loop end."""
_gateways: WeakValueDictionary[str, Gateway] = WeakValueDictionary()
"""Gateways by the host name in their clients' base URL."""


class LoopThread:
    """An event loop in a separate thread, which keeps running while other threads block.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine in the thread's event loop; cancelling the returned future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the thread's event loop; the caller awaits the result in its own event loop."""
        return await asyncio.wrap_future(self.start(coroutine))

    def cancel_tasks(self) -> bool:
        """Cancel all tasks of the thread's event loop; return whether they end within :data:`JOIN_TIMEOUT_S` seconds."""
        try:
            self.start(cancel_others()).result(JOIN_TIMEOUT_S)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel all tasks of the thread's event loop, and end the thread."""
        self.cancel_tasks()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def cancel_others() -> None:
    """Cancel all tasks of the running event loop except the current task, and wait until they end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True)
class Reply:
    """The answer to an HTTP request.

    Attributes:
        status: HTTP status.
        kind: media type of the content.
        content: body of the answer.
        keep: function to call if the answer did not reach the client; it stores the answer, which the client then gets if it
            repeats the request.
    """

    status: int
    kind: str
    content: bytes
    keep: Callable[[], None] = lambda: None


class Gateway:
    """Answers the requests that the program of one episode sends to the chat APIs in :data:`APIS`.

    Args:
        calls: queue of the episode's calls, that is, of the chat requests that the policy must answer.
        loop: event loop in which the methods of ``calls`` must be called.
    """

    def __init__(self, calls: Calls, loop: LoopThread) -> None:
        self.calls, self.loop = calls, loop
        self._host = f"policy-{uuid4().hex}"
        _gateways[self._host] = self

    @staticmethod
    def of(chat: AsyncOpenAI) -> Gateway:
        """Return the gateway that answers the requests of a program's client.

        Raises:
            ValueError: the client was not made by :meth:`client`.
        """
        if (gateway := _gateways.get(chat.base_url.host)) is None:
            raise ValueError(f"Expected the client that the program was given, got one of {chat.base_url}.")
        return gateway

    def client(self) -> AsyncOpenAI:
        """Return an OpenAI client whose requests this gateway answers, without a network connection.

        Raises:
            MissingPackageError: the package ``openai`` is not installed.
        """
        try:
            import httpx2
            import openai
        except ImportError as error:
            raise MissingPackageError(
                f"A program's client needs the package openai; install it with: {install_command('endpoint')}"
            ) from error

        async def respond(request: httpx2.Request) -> httpx2.Response:
            path = request.url.path
            reply = await self.loop.call(self.respond(request.method, path, request.content))
            return httpx2.Response(reply.status, content=reply.content, headers={"Content-Type": reply.kind})

        return openai.AsyncOpenAI(
            api_key="none",
            base_url=f"http://{self._host}/v1",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(respond)),
        )

    async def respond(self, method: str, path: str, content: bytes) -> Reply:
        """Answer an HTTP request; errors have the format of the chat API that the path selects."""
        path = path.removeprefix("/v1").rstrip("/")
        if method == "GET" and path.startswith("/models"):
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "trial-ray"}
            return _json(200, {"object": "list", "data": [card]} if path == "/models" else card)
        api = APIS.get(path, chat_completions)
        if method != "POST" or path not in APIS:
            known = ", ".join(f"POST /v1{known}" for known in APIS)
            return _json(404, api.error(404, f"Expected {known} or GET /v1/models, got {method} {path}.", "not_found"))
        try:
            body = json.loads(content)
            if not isinstance(body, dict):
                raise ValueError(f"Expected a JSON object as the body, got {content[:200]!r}.")
            request = api.chat_request(body)
        except ValueError as error:
            self.calls.reject(error)
            return _json(400, api.error(400, str(error), None))
        try:
            completion = await self.calls.complete(request)
        except RefusedCallError as error:
            return _json(error.status, api.error(error.status, str(error), error.code))
        keep = partial(self.calls.keep, request, completion)
        if not body.get("stream"):
            return _json(200, api.answer(completion, body), keep)
        events = "".join(_event(*event) for event in api.events(completion, body))
        return Reply(200, "text/event-stream", events.encode(), keep)


def error_reply(path: str, status: int, message: str) -> Reply:
    """Return an error in the format of the chat API that the path of a request selects."""
    return _json(status, APIS.get(path.removeprefix("/v1"), chat_completions).error(status, message, None))


def _event(name: str, data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def _json(status: int, body: Any, *keep: Callable[[], None]) -> Reply:
    return Reply(status, "application/json", json.dumps(body).encode(), *keep)

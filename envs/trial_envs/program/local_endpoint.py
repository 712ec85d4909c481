"""HTTP server for a program's chat requests, for an agent that runs in another process or is not written in Python."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trial_envs.core.extras import install_command
from trial_envs.errors import MissingPackageError
from trial_envs.program.gateway import JOIN_TIMEOUT_S, Gateway, Reply, error_reply

if TYPE_CHECKING:
    from aiohttp import web
    from openai import AsyncOpenAI

MAX_BYTES = 2**26
"""Maximum size of a request in bytes."""


@asynccontextmanager
async def local_endpoint(chat: AsyncOpenAI) -> AsyncIterator[dict[str, str]]:
    """Serve the policy over HTTP while the context is open.

    Clients can use the Chat Completions, Responses and Messages APIs, and list the models. The endpoint is bound to 127.0.0.1
    and only accepts requests with its own API key. A client that disconnects cancels its request. When the context
    closes, waiting requests get the status 503, and connections are closed.

    Args:
        chat: the client that the environment passed to the program.

    Yields:
        Environment variables to set for clients: ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
        ``ANTHROPIC_API_KEY``.

    Raises:
        MissingPackageError: the package ``aiohttp`` is not installed.
        ValueError: ``chat`` is not the client that the environment passed to the program.
    """
    server = _Server(Gateway.of(chat))
    url = await server.gateway.loop.call(server.start())
    try:
        yield {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": server.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": server.key,
        }
    finally:
        await server.gateway.loop.call(server.end())


class _Server:
    """An HTTP server in the gateway's event loop. The server answers even while the program blocks its own event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.key = gateway, secrets.token_hex(16)
        self._runner: web.AppRunner
        self._open: set[asyncio.Task[Reply]] = set()
        self._ended = False

    async def start(self) -> str:
        """Start to listen; return the server's URL."""
        try:
            from aiohttp import web
        except ImportError as error:
            raise MissingPackageError(
                f"A local endpoint needs the package aiohttp; install it with: {install_command('endpoint')}"
            ) from error

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                reply = await self._reply(request.method, request.path, request.headers, await request.read())
            except web.HTTPRequestEntityTooLarge:
                reply = error_reply(request.path, 413, f"Expected a request of at most {MAX_BYTES} bytes.")
            response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.kind})
            response.content_length = len(reply.content)
            try:
                await response.prepare(request)
                await response.write(reply.content)
                await response.write_eof()
            except BaseException:
                reply.keep()
                raise
            return response

        application = web.Application(client_max_size=MAX_BYTES)
        application.router.add_route("*", "/{path:.*}", handle)
        # With handler_cancellation, a client that disconnects cancels the handler of its request.
        self._runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=JOIN_TIMEOUT_S / 4
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def _reply(self, method: str, path: str, headers: Mapping[str, str], content: bytes) -> Reply:
        key = headers.get("x-api-key") or headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            return error_reply(path, 401, "Expected the key of this endpoint, which is in OPENAI_API_KEY.")
        call = asyncio.create_task(self.gateway.respond(method, path, content))
        self._open.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if not self._ended:
                # If the policy answered before the client disconnected, keep the answer for a repeated request.
                if call.done() and not call.cancelled():
                    call.result().keep()
                raise
            return error_reply(path, 503, "The endpoint was closed, because the program needs no more answers.")
        finally:
            self._open.discard(call)

    async def end(self) -> None:
        """Answer waiting requests with an error, and close the connections."""
        self._ended = True
        for call in self._open:
            call.cancel()
        await self._runner.cleanup()

"""A program's chat client at a local address, for an agent that runs in another process or is not written in Python."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

MAX_BYTES = 2**26
"""Maximum size of a request."""
POLL_S, JOIN_TIMEOUT_S = 0.05, 10.0
"""Seconds after which the server sees that it has to end, and within which it ends."""


@asynccontextmanager
async def local_endpoint(chat: AsyncOpenAI) -> AsyncIterator[dict[str, str]]:
    """Serve the client of a :class:`~trial_envs.program.ProgramEnv`'s program over HTTP while the context is open.

    The endpoint is bound to 127.0.0.1 and accepts requests with its own key alone. They are answered as the client's calls, with
    the same rules. Those that have no answer yet when the context closes get the status 503, and so do later ones on a connection
    that is open; new connections are refused.

    Args:
        chat: the client that the program was given.

    Yields:
        ``{"OPENAI_BASE_URL": ..., "OPENAI_API_KEY": ...}``, the environment variables that OpenAI's clients read.
    """
    server = _Server(chat, asyncio.get_running_loop())
    thread = Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1", "OPENAI_API_KEY": server.key}
    finally:
        server.ended = True
        server.shutdown()
        thread.join(JOIN_TIMEOUT_S)
        server.server_close()
        for call in tuple(server.calls):
            call.cancel()


class _Server(ThreadingHTTPServer):
    """Has a thread for each connection, whose requests are answered in the program's event loop."""

    def __init__(self, chat: AsyncOpenAI, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = secrets.token_hex(16)
        self.calls: set[Future[tuple[int, bytes]]] = set()
        self.ended = False
        self._chat, self._loop = chat, loop

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request."""
        if self.ended:  # A client may still use its open connection.
            return _ENDED
        call = asyncio.run_coroutine_threadsafe(self._answer(path, body), self._loop)
        self.calls.add(call)
        try:
            return call.result()  # The end of the episode cancels the call.
        except CancelledError:
            return _ENDED
        finally:
            self.calls.discard(call)

    async def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        import httpx2
        import openai

        if self.ended:
            return _ENDED
        try:
            fields = dict(json.loads(body))
        except (ValueError, TypeError):
            return 400, _error(f"expected a JSON object, got {body[:200]!r}")
        try:
            response = await self._chat.post(path.removeprefix("/v1"), cast_to=httpx2.Response, body=fields)
        except openai.APIStatusError as error:
            response = error.response
        except Exception as error:  # The program may have closed the client.
            return 500, _error(f"{type(error).__name__}: {error}")
        return response.status_code, response.content


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 600.0

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BYTES:
            self.close_connection = True
            return self._send(413, _error(f"expected a Content-Length of at most {MAX_BYTES}, got {length or 'none'}"))
        body = self.rfile.read(int(length))
        key = f"Bearer {self.server.key}"
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), key.encode()):
            return self._send(401, _error("expected the key in OPENAI_API_KEY"))
        return self._send(*self.server.answer(self.path, body))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Do nothing: requests are not logged."""


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


_ENDED = 503, _error("the episode has ended")

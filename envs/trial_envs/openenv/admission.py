"""Access limits of the OpenEnv server: allowed host names and sites, and a time limit for requests to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, ClassVar
from urllib.parse import urlsplit

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
REQUEST_SECONDS = 10.0
"""Seconds for a complete request to arrive, from the start of the connection or from the last response."""
MAX_WAITING = 64
"""Maximum number of connections without a complete request. If there are more, the connection that has waited longest is
closed, so that such connections cannot use up all file descriptors."""


class AllowedNames:
    """Rejects requests with an unknown ``Host`` or from another site's page, because any page can make a browser send them.

    Loopback names, the address of the connection, ``hosts``, ``origins`` and pages of the server itself are allowed. Clients
    other than browsers send no ``Origin``, so only their ``Host`` is checked.

    Args:
        app: the wrapped application.
        hosts: further names of the server.
        origins: further allowed sites, such as ``https://example.org``.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = (), origins: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = LOOPBACK | {host.lower() for host in hosts}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it with status 403 if its ``Host`` or ``Origin`` is not allowed."""
        refused = self._refused(scope) if scope["type"] in ("http", "websocket") else ""
        if not refused:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            # The server answers with status 403 if a WebSocket is closed before it was accepted.
            await send({"type": "websocket.close", "code": 1008, "reason": refused})
        else:
            await JSONResponse({"detail": refused}, 403)(scope, receive, send)

    def _refused(self, scope: Scope) -> str:
        """Return the reason to reject a request; an empty text if the request is allowed."""
        headers = [(name, value.decode("latin-1").lower()) for name, value in scope["headers"]]
        names = [value for name, value in headers if name == b"host"]
        own = (scope.get("server") or ("",))[0]
        if len(names) != 1 or _host(f"//{names[0]}") not in self._hosts | {own}:
            return "the Host of the request is not a loopback name; allow it with --allow-host"
        for origin in (value for name, value in headers if name == b"origin"):
            same = origin.partition("://")[2] == names[0]
            if not same and origin not in self._origins and _host(origin) not in LOOPBACK:
                return "the Origin of the request is another site; allow it with --allow-origin"
        return ""


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class TimedRequests(H11Protocol):
    """uvicorn's HTTP protocol, extended to close a connection if no complete request arrives within :data:`REQUEST_SECONDS`.

    The deadline of uvicorn itself applies only until the first byte of a request.
    """

    _waiting: ClassVar[dict[TimedRequests, asyncio.TimerHandle]] = {}
    """Connections without a complete request, oldest first."""

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request."""
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        """Stop the deadline if the request is complete."""
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        """Start the deadline of the next request."""
        super().on_response_complete()
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline of the closed connection."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _update_deadline(self) -> None:
        """Start the deadline if the connection waits for a request or for the rest of one; stop it otherwise."""
        upgraded = self.transport.get_protocol() is not self
        if self.transport.is_closing() or upgraded or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self not in self._waiting:
            self._waiting[self] = self.loop.call_later(REQUEST_SECONDS, self._close)
            if len(self._waiting) > MAX_WAITING:
                next(iter(self._waiting))._close()

    def _stop_waiting(self) -> None:
        if timer := self._waiting.pop(self, None):
            timer.cancel()

    def _close(self) -> None:
        self._stop_waiting()
        self.transport.close()

"""OpenEnv's HTTP and WebSocket server for the text environments."""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from openenv.core.env_server import ConcurrencyConfig, create_fastapi_app
from starlette.types import ASGIApp, Receive, Scope, Send

from trial_envs.core.fork_server import CLOSE_SECONDS
from trial_envs.errors import SessionProcessError, TrialEnvError
from trial_envs.openenv.admission import AllowedNames, TimedRequests
from trial_envs.openenv.processes import SessionProcesses
from trial_envs.openenv.session import EpisodeState, SessionEnvironment, TextObservation, action_model

_JSON_BYTES = 12
"""Maximum number of bytes that one character takes in JSON."""
_OTHER_BYTES = 4096
"""Maximum number of bytes of a message in addition to its action."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        max_sessions: maximum number of sessions at a time.
        idle_timeout_s: seconds without a request after which a session and its process end; OpenEnv checks at intervals of a
            quarter of this time, but of at least 5 s.
        max_action: maximum length of an action in characters. The server closes a connection on which a
            message of more than ``max_message`` bytes arrives.
        hosts: host names that clients may use for the server, in addition to loopback names and the address of the connection.
        origins: sites with pages that may use the server, in addition to loopback sites and the server's own site.
    """

    max_sessions: int = 64
    idle_timeout_s: float = 600.0
    max_action: int = 10_000
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    @property
    def max_message(self) -> int:
        """Maximum length of a message in bytes: 12 bytes per character of the longest action, and 4,096 bytes for the rest."""
        return _JSON_BYTES * self.max_action + _OTHER_BYTES


class BodyLimit:
    """Rejects HTTP requests with a body that is longer than a limit, or of unknown length.

    Args:
        app: the wrapped application.
        limit: maximum length in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it with status 413 if its body is too long or of unknown length."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)) > self._limit:
                refusal = JSONResponse({"detail": f"expected a body of at most {self._limit} bytes"}, 413)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(processes: SessionProcesses, env_id: str, limits: ServerLimits) -> FastAPI:
    """Return OpenEnv's application; each session runs in a separate process, which ``processes`` starts."""
    app: FastAPI = create_fastapi_app(
        partial(SessionEnvironment, processes, env_id),
        action_model(limits.max_action),
        TextObservation,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=limits.max_sessions, session_timeout=limits.idle_timeout_s
        ),
        env_name=env_id.rpartition("/")[2],
        state_cls=EpisodeState,
    )
    app.add_api_route("/limits", lambda: {"max_sessions": limits.max_sessions})
    app.add_middleware(BodyLimit, limit=limits.max_message)
    app.add_middleware(AllowedNames, hosts=limits.hosts, origins=limits.origins)
    app.add_exception_handler(TrialEnvError, _refusal)
    return app


async def _refusal(request: Request, error: Exception) -> JSONResponse:
    status = 503 if isinstance(error, SessionProcessError) else 400
    return JSONResponse({"detail": str(error), "error": type(error).__name__}, status)


def serve(env_id: str, settings: dict[str, Any], address: tuple[str, int], limits: ServerLimits) -> None:
    """Serve an environment until the process is terminated; print the URL as a line of JSON when the server listens.

    Args:
        env_id: id of a text environment.
        settings: keyword arguments of the environment's constructor.
        address: host and port; 0 selects a free port.
        limits: limits of the server.

    Raises:
        RemoteEnvError: the environment cannot be made.
        OSError: the address cannot be used.
    """
    # SIGINT needs a handler too, because a shell starts background commands with SIGINT ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family) as listener:
        processes = SessionProcesses(env_id, settings, limits.max_sessions)
        try:
            config = uvicorn.Config(
                make_app(processes, env_id, limits),
                log_level="warning",
                http=TimedRequests,
                ws_max_size=limits.max_message,
                timeout_graceful_shutdown=2 * CLOSE_SECONDS,
            )
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            print(json.dumps({"env": env_id, "url": url, "max_sessions": limits.max_sessions}), flush=True)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            processes.close()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by raising ``SystemExit``.

    While uvicorn runs, uvicorn handles signals. After its shutdown, uvicorn raises the signal again, which calls this handler.
    """
    sys.exit(128 + number)

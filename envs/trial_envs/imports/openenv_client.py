"""A connection to an OpenEnv server: calls have a deadline, and failures raise this package's errors."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from trial_envs.core.extras import install_command
from trial_envs.errors import (
    MissingPackageError,
    RemoteEnvError,
    ServerAnswerError,
    ServerConnectionError,
    ServerTimeoutError,
    TrialEnvError,
)

Answer = TypeVar("Answer")

MAX_MEGABYTES = 4.0
"""Maximum size of a message from the server, in MB."""
CLOSE_SECONDS = 2.0
"""Seconds for closing the connection, and for stopping a call after its deadline."""
_TOO_LONG = 1009
"""WebSocket status code for a message that is too long."""


@dataclass(frozen=True)
class ServerAnswer:
    """An answer to ``reset`` or ``step`` as the server sent it; the types of the values are not checked.

    Attributes:
        observation: the observation.
        reward: the reward.
        done: whether the episode has ended.
    """

    observation: Any
    reward: Any
    done: Any


@functools.cache
def _client_class() -> type[Any]:
    """Return a subclass of OpenEnv's client that never reconnects, so an episode cannot silently continue in a new session.

    Raises:
        MissingPackageError: OpenEnv is not installed.
    """
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise MissingPackageError(
            f"OpenEnv's client cannot be imported ({error}): {install_command('openenv')}"
        ) from error

    class SessionClient(GenericEnvClient):
        async def _ensure_connected(self) -> None:
            if self._ws is None:
                raise ConnectionError("the connection was closed")

    return SessionClient


class ServerConnection:
    """A session on an OpenEnv server, through OpenEnv's client.

    The client runs in an event loop in a separate thread, because a caller may already have a running loop.

    Args:
        url: URL of the server, ``http://...`` or ``ws://...``.
        timeout_s: seconds for connecting and for each call.

    Raises:
        MissingPackageError: OpenEnv is not installed.
        ServerConnectionError: the server cannot be reached, or uses another protocol.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._owner = os.getpid()
        self._client = _client_class()(
            base_url=url,
            # The client's time limits exceed the deadline of a call, so the deadline ends the call first.
            connect_timeout_s=2 * timeout_s,
            message_timeout_s=2 * timeout_s,
            max_message_size_mb=MAX_MEGABYTES,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trial-envs-openenv", daemon=True)
        self._thread.start()
        try:
            self._run("connecting", self._connect())
        except TrialEnvError:
            self.close()
            raise

    @property
    def belongs_here(self) -> bool:
        """True if this process made the connection; a forked child lacks the client's thread and must not use its socket."""
        return self._owner == os.getpid()

    def reset(self, **arguments: Any) -> ServerAnswer:
        """Start an episode.

        Raises:
            RemoteEnvError: the server answered with an error.
            ServerTimeoutError: the server did not answer in time.
            ServerConnectionError: the connection was lost.
            ServerAnswerError: the answer is not JSON, is not an object, or is too long.
        """
        return self._run("reset", self._reset(arguments))

    def step(self, action: dict[str, Any]) -> ServerAnswer:
        """Carry out an action; raise the same errors as :meth:`reset`."""
        return self._run("step", self._step(action))

    def close(self) -> None:
        """Close the connection, with a time limit of :data:`CLOSE_SECONDS`, and end the thread."""
        if not self.belongs_here or self._loop.is_closed():
            return
        with suppress(Exception):
            future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            future.result(2 * CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _connect(self) -> None:
        await self._client.connect()

    async def _reset(self, arguments: dict[str, Any]) -> ServerAnswer:
        result = await self._client.reset(**arguments)
        return ServerAnswer(result.observation, result.reward, result.done)

    async def _step(self, action: dict[str, Any]) -> ServerAnswer:
        result = await self._client.step(action)
        return ServerAnswer(result.observation, result.reward, result.done)

    async def _close(self) -> None:
        with suppress(Exception):
            await asyncio.wait_for(self._client.close(), CLOSE_SECONDS)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, stage: str, call: Coroutine[Any, Any, Answer]) -> Answer:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, self._timeout_s), self._loop)
        try:
            return future.result(self._timeout_s + CLOSE_SECONDS)
        except TimeoutError as error:
            future.cancel()
            raise ServerTimeoutError(f"{self._url}, {stage}: no answer within {self._timeout_s:g} s.") from error
        except Exception as error:
            raise self._explained(stage, error) from error

    def _explained(self, stage: str, error: Exception) -> TrialEnvError:
        """Convert an exception of OpenEnv's client, or of a library that the client uses, to an error of this package."""
        from websockets.exceptions import ConnectionClosed

        message = f"{self._url}, {stage}: {type(error).__name__}: {error!s:.300}"
        if isinstance(error, ConnectionClosed):
            if error.sent is not None and error.sent.code == _TOO_LONG:
                return ServerAnswerError(f"{message}; expected an answer of at most {MAX_MEGABYTES:g} MB")
            return ServerConnectionError(message)
        if isinstance(error, OSError):
            return ServerConnectionError(f"{message}; expected a server of OpenEnv there")
        if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
            return RemoteEnvError(message)  # OpenEnv's client raises RuntimeError if the server sends an error.
        return ServerAnswerError(f"{message}; expected an answer of OpenEnv as JSON")

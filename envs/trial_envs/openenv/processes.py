"""A separate process for every session, so that a hang, a crash or the use of much memory affects only one session."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trial_envs.core.fork_server import CLOSE_SECONDS, ForkedProcesses, ask
from trial_envs.errors import RemoteEnvError, SessionProcessError
from trial_envs.openenv.fork_server import MAX_BYTES, READY

START_SECONDS = 300.0
"""Time limit in seconds for making the environment, which may load or generate data."""
STEP_SECONDS = 60.0
"""Time limit in seconds for the answer to ``reset`` or ``step``."""
MAX_ANSWER_BYTES = 1 << 24


class SessionProcess:
    """The process of one session.

    Args:
        connection: non-blocking connection to the process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    async def ask(self, *request: Any) -> dict[str, Any]:
        """Send a method's name and arguments to the process; return the observation's fields from the answer.

        Raises:
            RemoteEnvError: the environment rejected the request; the session continues.
            SessionProcessError: the process could not be started, has ended, or did not answer in time; it cannot be used
                again.
        """
        if not self._asking.acquire(blocking=False):
            raise RemoteEnvError("The session has not answered the request before this one.")
        try:
            async with asyncio.timeout(STEP_SECONDS):
                response = await ask(self._connection, request, MAX_ANSWER_BYTES)
            if "ended" in response:
                raise ConnectionError("the process ended")
        except TimeoutError as error:
            raise SessionProcessError(f"The session's process gave no answer within {STEP_SECONDS:g} s.") from error
        except (OSError, ValueError) as error:
            raise SessionProcessError(
                "The session's process ended: it was killed, or its memory was short; reset() starts another one."
            ) from error
        finally:
            self._asking.release()
        if "refused" in response:
            raise SessionProcessError(f"No process could be started for the session: {response['refused']}")
        if "error" in response:
            raise RemoteEnvError(response["error"])
        return response

    def end(self) -> None:
        """Close the connection; the process then closes the environment and ends."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # shutdown() also ends a running ask().
        if self._asking.acquire(timeout=CLOSE_SECONDS):  # Do not close a socket that ask() still uses.
            self._connection.close()


class SessionProcesses:
    """The processes of all sessions, forked by one fork server; see :mod:`trial_envs.openenv.fork_server`.

    Args:
        env_id: id of a text environment of this package.
        settings: keyword arguments of the environment's constructor.
        limit: maximum number of sessions at a time.

    Raises:
        RemoteEnvError: the environment cannot be made; the message contains the reason.
        SessionProcessError: the fork server does not start.
    """

    def __init__(self, env_id: str, settings: Mapping[str, Any], limit: int) -> None:
        self._forks = ForkedProcesses(
            "trial_envs.openenv.fork_server",
            env_id,
            dict(settings),
            stdout=sys.stderr.fileno(),
            await_ready=_await_ready,
        )
        self._limit = limit
        self._running: set[SessionProcess] = set()
        self._starting = 0
        self._lock = threading.Lock()
        self._forks.prepare()

    def start(self) -> SessionProcess:
        """Start the process of a new session.

        Raises:
            RemoteEnvError: the fork server has ended, and the environment cannot be made in a new one.
            SessionProcessError: the limit of sessions is reached, or the fork server has ended and cannot be started again.
        """
        with self._lock:
            if len(self._running) + self._starting >= self._limit:
                raise SessionProcessError(f"{self._limit} sessions are running, which is the limit; try again later.")
            self._starting += 1
        try:
            process = SessionProcess(self._forks.start())
            with self._lock:
                self._running.add(process)
            return process
        except OSError as error:
            raise SessionProcessError(f"No process could be started for the session: {error}") from error
        finally:
            with self._lock:
                self._starting -= 1

    def end(self, process: SessionProcess) -> None:
        """End the process of a session, so that another session may start."""
        with self._lock:
            known = process in self._running
            self._running.discard(process)
        if known:
            process.end()

    def close(self) -> None:
        """End all processes and the fork server."""
        self._forks.close()


def _await_ready(control: socket.socket) -> None:
    """Wait until the fork server has made the environment."""
    control.settimeout(START_SECONDS)
    try:
        message = control.recv(MAX_BYTES)
    except OSError as error:
        raise SessionProcessError(f"The environment was not made within {START_SECONDS:g} s: {error}") from error
    if message != READY:
        raise RemoteEnvError(message.decode() or "the process in which the environment was made ended")

"""A process for every session: one that hangs, dies or grows costs its own session alone."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trial_envs.errors import RemoteEnvError, SessionProcessError
from trial_envs.openenv.fork_server import CLOSE_SECONDS, MOST_BYTES, PID, START

START_SECONDS = 300.0
"""Time in which the environment must be made, which may load data or generate them."""
STEP_SECONDS = 60.0
"""Time in which ``reset`` or ``step`` must answer."""
MOST_ANSWER_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 16


class SessionProcess:
    """The process of one session.

    Args:
        pid: its id, and that of its process group.
        pidfd: readable when it has ended.
        connection: to it; does not block.
    """

    def __init__(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        self._pid, self._pidfd = pid, pidfd
        self._connection = connection
        self._asking = threading.Lock()

    async def ask(self, *request: Any) -> dict[str, Any]:
        """Send a request and return its answer; see :func:`trial_envs.openenv.fork_server.answer`.

        Raises:
            RemoteEnvError: the environment refused the request; the session goes on.
            SessionProcessError: the process ended or did not answer in time, and cannot be used again.
        """
        if not self._asking.acquire(blocking=False):
            raise RemoteEnvError("the session has not answered the request before this one")
        try:
            async with asyncio.timeout(STEP_SECONDS):
                found: dict[str, Any] = json.loads(await self._exchange(json.dumps(request).encode() + b"\n"))
        except TimeoutError as error:
            raise SessionProcessError(f"the session's process gave no answer within {STEP_SECONDS:g} s") from error
        except (OSError, ValueError) as error:
            raise SessionProcessError(
                "the session's process ended: it was killed, or its memory was short; reset() starts another one"
            ) from error
        finally:
            self._asking.release()
        if "error" in found:
            raise RemoteEnvError(found["error"])
        return found

    async def _exchange(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, request)
        received = bytearray()
        while not received.endswith(b"\n"):
            chunk = await loop.sock_recv(self._connection, _CHUNK_BYTES)
            if not chunk:
                raise ConnectionError("the connection was closed")
            received += chunk
            if len(received) > MOST_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
        return bytes(received)

    def end(self) -> None:
        """Let the environment close, and end the process where it does not; waits :data:`CLOSE_SECONDS` at most."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # a call that waits for an answer sees it too
        if not select.select([self._pidfd], [], [], CLOSE_SECONDS)[0]:
            with suppress(ProcessLookupError):  # it ended this moment, or has no group of its own yet
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        if self._asking.acquire(timeout=CLOSE_SECONDS):  # the event loop must not lose a descriptor that it waits for
            self._connection.close()


class SessionProcesses:
    """Starts the processes of all sessions, by a program that is forked for each; see :mod:`trial_envs.openenv.fork_server`.

    Args:
        env_id: id of a text environment of this package.
        settings: keyword arguments of its constructor.
        limit: most processes at a time.

    Raises:
        RemoteEnvError: the environment cannot be made; the message says why.
        SessionProcessError: the program does not start.
    """

    def __init__(self, env_id: str, settings: Mapping[str, Any], limit: int) -> None:
        self._command = [sys.executable, "-m", "trial_envs.openenv.fork_server"]
        self._arguments = [env_id, json.dumps(dict(settings))]
        self._limit = limit
        self._running: set[SessionProcess] = set()
        self._starting = 0
        self._lock = threading.Lock()
        self._start_server()

    def start(self) -> SessionProcess:
        """Start a process.

        Raises:
            SessionProcessError: there are as many as there may be, or the system refuses another one.
        """
        with self._lock:
            if len(self._running) + self._starting >= self._limit:
                raise SessionProcessError(f"{self._limit} sessions are running, which is the limit; try again later")
            self._starting += 1
        try:
            process = self._start()
            with self._lock:
                self._running.add(process)
            return process
        finally:
            with self._lock:
                self._starting -= 1

    def end(self, process: SessionProcess) -> None:
        """End a process; another one may start from then on."""
        with self._lock:
            known = process in self._running
            self._running.discard(process)
        if known:
            process.end()

    def close(self) -> None:
        """End all processes, and the program that starts them."""
        self._control.close()
        try:
            self._server.wait(timeout=2 * CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()  # the sessions' processes die with it
            self._server.wait(timeout=CLOSE_SECONDS)

    def _start(self) -> SessionProcess:
        ours, theirs = socket.socketpair()
        try:
            ours.settimeout(START_SECONDS)
            with theirs, self._lock:
                if self._server.poll() is not None:
                    self._control.close()
                    self._start_server()
                socket.send_fds(self._control, [START], [theirs.fileno()])
            message, descriptors, _, _ = socket.recv_fds(ours, MOST_BYTES, 1)
            if not descriptors:
                raise SessionProcessError(f"no process could be started for the session: {message.decode()}")
            ours.setblocking(False)
            (pid,) = PID.unpack(message)
            return SessionProcess(pid, descriptors[0], ours)
        except OSError as error:
            ours.close()
            raise SessionProcessError(f"no process could be started for the session: {error}") from error
        except BaseException:
            ours.close()
            raise

    def _start_server(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [*self._command, str(theirs.fileno()), *self._arguments]
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control.settimeout(START_SECONDS)
        try:
            told = self._control.recv(MOST_BYTES)
        except OSError as error:
            self._server.kill()
            raise SessionProcessError(f"the environment was not made within {START_SECONDS:g} s: {error}") from error
        if told != START:
            self._server.wait(timeout=CLOSE_SECONDS)
            raise RemoteEnvError(told.decode() or "the process in which the environment was made ended")

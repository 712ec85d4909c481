"""Fork server: a program that forks itself whenever its owner, the process that started the program, requests a process.

The fork server imports the modules of its processes once and has a single thread. A fork is therefore safe and takes
milliseconds, and the processes share memory until they write to it. Each process communicates with the owner over a connection.
When the owner closes the connection or dies for any reason, the process should end. If it still runs after
:data:`CLOSE_SECONDS`, it is killed, with the processes that it started.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

START = b"S"
"""Message that requests a process from the fork server; the process's socket is sent with the message."""
CLOSE_SECONDS = 2
"""Seconds after which a process that should end, but still runs, is killed."""
SEND_SECONDS = 60.0
PROGRAM = (
    "import importlib, json, sys; _, module, control, arguments, *sys.path[:] = sys.argv; "
    "importlib.import_module(module).main(int(control), *json.loads(arguments))"
)
_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class ForkedProcesses:
    """Starts processes that have a connection to the calling process; a fork server, started when needed, forks them.

    Args:
        module: name of a module with a function ``main(control, *arguments)``, which calls :func:`serve` on the descriptor
            ``control``.
        arguments: further arguments of ``main``, serialisable to JSON.
        stdout: standard output of the fork server, or ``None`` for the standard output of the calling process.
        await_ready: called with the connection to the fork server after its start; if it raises an exception, the fork server
            is killed.
    """

    def __init__(
        self,
        module: str,
        *arguments: Any,
        stdout: int | None = None,
        await_ready: Callable[[socket.socket], None] = lambda control: None,
    ) -> None:
        self._module = module
        self._arguments = json.dumps(arguments)
        self._stdout = stdout
        self._await_ready = await_ready
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self) -> socket.socket:
        """Start a process.

        Returns:
            The non-blocking connection to the process, for :func:`ask`. If the process ends or cannot be started, the last
            message on it is ``{"ended": STATUS}`` (negative for a signal) or ``{"refused": REASON}``.

        Raises:
            OSError: the fork server cannot be started, or has just died.
            Exception: ``await_ready`` raised it after a start of the fork server.
        """
        connection, child_end = socket.socketpair()
        try:
            connection.setblocking(False)
            with self._lock, child_end:
                socket.send_fds(self._program(), [START], [child_end.fileno()])
            return connection
        except BaseException:
            connection.close()
            raise

    def prepare(self) -> None:
        """Start the fork server if it is not running; raise the same errors as :meth:`start`."""
        with self._lock:
            self._program()

    def close(self) -> None:
        """End the fork server and its processes; processes that still run after :data:`CLOSE_SECONDS` are killed."""
        with self._lock:
            if self._server is None or self._control is None:
                return
            self._control.close()
            try:
                self._server.wait(timeout=2 * CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()  # The kernel kills the forked processes when their parent dies (PR_SET_PDEATHSIG).
                self._server.wait(timeout=CLOSE_SECONDS)
            self._server = self._control = None

    def _program(self) -> socket.socket:
        """Return the connection to the fork server, which is started if it is not running."""
        if self._control is not None and self._server is not None and self._server.poll() is None:
            return self._control
        if self._control is not None:
            self._control.close()
        control, program_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.settimeout(SEND_SECONDS)
        self._control = control
        with program_end:
            descriptor = program_end.fileno()
            command = [sys.executable, "-c", PROGRAM, self._module, str(descriptor), self._arguments, *sys.path]
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        try:
            self._await_ready(control)
        except BaseException:
            self._server.kill()
            self._server.wait(timeout=CLOSE_SECONDS)
            raise
        return control


async def ask(connection: socket.socket, request: Any, max_bytes: int) -> dict[str, Any]:
    """Send a request to a process and read its answer; both are a line of JSON.

    Raises:
        ValueError: the answer is longer than ``max_bytes``, or is not JSON.
        OSError: the connection is closed.
    """
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):  # If the process has ended, its exit status can still be received.
        await loop.sock_sendall(connection, json_line(request))
    received = bytearray()
    chunk = b""
    while b"\n" not in chunk:
        try:
            chunk = await loop.sock_recv(connection, _CHUNK_BYTES)
        except ConnectionResetError:  # The process ended before it read the request.
            chunk = b""
        if not chunk:
            raise ConnectionError("it ended")
        received += chunk
        if len(received) > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
    answer: dict[str, Any] = json.loads(received.partition(b"\n")[0])
    return answer


def json_line(value: Any) -> bytes:
    """Encode a request or an answer as a line of JSON."""
    return json.dumps(value).encode() + b"\n"


@dataclass(slots=True)
class _Child:
    """A forked process.

    Attributes:
        pid: id of the process and of its process group.
        connection: the process's end of the connection. The fork server keeps it open to notice when the owner closes the other
            end, and to send the exit status.
        ends_at: monotonic time at which the process is killed; infinite while the owner keeps the connection open.
    """

    pid: int
    connection: socket.socket
    ends_at: float = math.inf


def serve(control: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    """Start processes that the owner requests; return when the owner has closed ``control`` or died, and all processes have ended.

    Args:
        control: connection to the owner, which preserves message boundaries.
        answer: function that each process calls with its connection; the process ends when the function returns.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # The owner handles these signals (Ctrl-C, closed terminal).
        signal.signal(number, signal.SIG_IGN)
    _ForkServer(control, answer).serve()


class _ForkServer:
    def __init__(self, control: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        self._control = control
        self._answer = answer
        self._children: dict[int, _Child] = {}
        """Running processes by pidfd, a descriptor that becomes readable when the process ends."""
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)

    def serve(self) -> None:
        serving = True
        while serving or self._children:
            ends_at = min((child.ends_at for child in self._children.values()), default=math.inf)
            ready = self._wait(ends_at)
            # Start new processes last, because their descriptors may have the numbers of descriptors that are closed here.
            for pidfd, child in [*self._children.items()]:
                if child.connection.fileno() in ready:  # The owner has closed its end of the connection.
                    self._poll.unregister(child.connection)
                    child.ends_at = time.monotonic() + CLOSE_SECONDS
                if child.ends_at <= time.monotonic():
                    _end_group(child.pid)
                    child.ends_at = math.inf
                if pidfd in ready:
                    self._reap(pidfd)
            if self._control.fileno() in ready and not self._handle_request():
                serving = False
                self._poll.unregister(self._control)
                for child in self._children.values():
                    child.ends_at = min(child.ends_at, time.monotonic() + CLOSE_SECONDS)

    def _wait(self, until: float) -> set[int]:
        """Wait for events, at most until the monotonic time ``until``; return the descriptors with events."""
        timeout = None if until == math.inf else max(0.0, until - time.monotonic())
        return {descriptor for descriptor, _ in self._poll.poll(timeout)}

    def _handle_request(self) -> bool:
        """Receive a request and start a process for it; return ``False`` if the owner has closed the connection."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, len(START), 1)
        except ConnectionError:
            return False
        if descriptors:
            self._start(socket.socket(fileno=descriptors[0]))
        elif message:  # The fork server had no free descriptor for the socket in the request, so the kernel closed it.
            print("fork server: no file descriptor is left, so no process is started", file=sys.stderr, flush=True)
        return bool(message)

    def _start(self, connection: socket.socket) -> None:
        """Fork a process that answers on ``connection``; if the fork fails, send the error on ``connection`` and close it."""
        pid, pidfd = 0, -1
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_process(connection, server)
            pidfd = os.pidfd_open(pid)
            self._poll.register(pidfd, select.EPOLLIN)
            self._poll.register(connection, 0)  # With mask 0, epoll reports only that the owner has closed its end.
        except (OSError, MemoryError) as error:
            if pid:
                _end_group(pid)
                os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            _send_last(connection, {"refused": f"{type(error).__name__}: {error}"})
        else:
            self._children[pidfd] = _Child(pid, connection)

    def _become_process(self, connection: socket.socket, server: int) -> NoReturn:
        """Call ``answer`` in the forked process and exit; does not return."""
        status = 1
        try:
            self._poll.close()
            self._control.close()
            for pidfd, child in self._children.items():
                child.connection.close()
                os.close(pidfd)
            os.setsid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:  # Otherwise, the fork server died before prctl() took effect.
                self._answer(connection)
                status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # A normal exit would wait for threads that are still running.

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        _end_group(child.pid)  # Kill the process's children before waitpid() frees the id of their group.
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with suppress(FileNotFoundError):  # The connection is already unregistered if the owner has closed its end.
            self._poll.unregister(child.connection)
        _send_last(child.connection, {"ended": os.waitstatus_to_exitcode(status)})


def _send_last(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send the exit status of a process, or the reason why it was not started, to the owner, and close the connection."""
    with suppress(OSError):  # The owner may have closed its end.
        connection.send(json_line(message), socket.MSG_DONTWAIT)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _end_group(pid: int) -> None:
    """Kill a forked process and all processes of its process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # The process has not called setsid() yet, so it has no group.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""The program that starts processes for environments: one an env runner, which forks itself for every environment.

It imports what every environment needs once, no environment itself, and has a single thread; so a fork is safe, costs
milliseconds, and shares its memory with the others until it is written. It ends, and every process with it, when the env runner
closes the connection or dies, however that happens.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
from ray import cloudpickle

from trial_ray.environments.guarded import GuardedEnv, StepResult, first_line
from trial_ray.errors import EnvironmentFaultError

REQUEST = struct.Struct("=cQ")
"""What an env runner sends: :data:`START`, with the process's end of its connection, or :data:`END`; and a number of its choice."""
START, END = b"S", b"E"
PR_SET_PDEATHSIG = 1
CLOSE_SECONDS = 2
"""Time in which an environment must close before its process is ended."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process.

    Attributes:
        pid: also of its process group.
        pidfd: readable when it has ended.
        connection: its own end, kept to tell the env runner how it ended.
    """

    pid: int
    pidfd: int
    connection: socket.socket


class ForkServer:
    """Starts and ends processes as the env runner asks.

    Args:
        control: connection to the env runner, which keeps the bounds of messages.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Return when the env runner has closed the connection, or has died, and every process has ended."""
        while self._await_events(None):
            pass
        # Environments see that their connections are closed, and close; what does not is ended.
        self._selector.unregister(self._control)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._children and time.monotonic() < deadline:
            self._await_events(deadline - time.monotonic())
        for child in self._children.values():
            end_group(child.pid)

    def _await_events(self, timeout_s: float | None) -> bool:
        """Handle what happens next; returns whether the env runner is still there."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                self._reap(key.data)
            elif not self._take_request():
                return False
        return True

    def _take_request(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, 1)
        except ConnectionError:
            return False
        if not message:
            return False
        kind, number = REQUEST.unpack(message)
        if kind == START and descriptors:
            self._start(number, socket.socket(fileno=descriptors[0]))
        elif kind == START:  # the system closed the process's end where this one has no descriptor left for it
            print("fork server: no descriptor left, so no process is started", file=sys.stderr, flush=True)
        elif number in self._children:
            end_group(self._children[number].pid)
        return True

    def _start(self, number: int, connection: socket.socket) -> None:
        """Start a process. A start that fails (memory, process ids, descriptors) ends its own connection alone."""
        pid, pidfd = 0, -1
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                _become_environment(connection, server, self._let_go)
            pidfd = os.pidfd_open(pid)
            self._selector.register(pidfd, selectors.EVENT_READ, number)
        except (OSError, MemoryError) as error:
            if pid:
                end_group(pid)
                os.waitpid(pid, 0)
            if pidfd >= 0:
                os.close(pidfd)
            _send_last(connection, {"refused": f"{type(error).__name__}: {error}"})
        else:
            self._children[number] = Child(pid, pidfd, connection)

    def _let_go(self) -> None:
        """Close in a new process what belongs to the server."""
        self._selector.close()
        self._control.close()
        for child in self._children.values():
            child.connection.close()
            os.close(child.pidfd)

    def _reap(self, number: int) -> None:
        child = self._children.pop(number)
        self._selector.unregister(child.pidfd)
        end_group(child.pid)  # what it started; before its id is free for another process
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        _send_last(child.connection, {"ended": os.waitstatus_to_exitcode(status)})


def _send_last(connection: socket.socket, message: dict[str, Any]) -> None:
    """Tell the env runner how a process ended, or that there is none, and close the connection."""
    with suppress(OSError):  # no reader is left
        connection.send(json_line(message), socket.MSG_DONTWAIT)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def end_group(pid: int) -> None:
    """End a process, and what it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _become_environment(connection: socket.socket, server: int, let_go: Callable[[], None]) -> NoReturn:
    """Answer for one environment until the connection is closed; does not return."""
    status = 1
    try:
        let_go()
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it died before the line above
            answer_requests(connection)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)  # threads of the environment could keep the interpreter


def answer_requests(connection: socket.socket) -> None:
    """Make the environment that the first line describes, and answer a request a line until the connection is closed."""
    lines = connection.makefile("rb")
    if not (line := lines.readline()):
        return
    setup = json.loads(line)
    np.random.seed()  # every fork would draw the same numbers
    try:
        _limit_memory(setup["memory_bytes"])
        entry, required = cloudpickle.loads(base64.b64decode(setup["environment"]))
    except Exception as error:
        fault = f"{setup['env_id']}, task {setup['task_id']!r}, creation: {first_line(error)}"
        connection.sendall(json_line({"fault": fault}))
        return
    env = GuardedEnv(entry, required)
    connection.sendall(json_line(_outcome(env, "make", [setup["task_id"]])))
    while line := lines.readline():
        method, *arguments = json.loads(line)
        connection.sendall(json_line(_outcome(env, method, arguments)))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process whose environment does not close
    signal.alarm(CLOSE_SECONDS)
    env.close()


def _outcome(env: GuardedEnv, method: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        found = getattr(env, method)(*arguments)
    except EnvironmentFaultError as error:
        return {"fault": str(error)}
    if isinstance(found, StepResult):
        return {"answer": asdict(found)}
    return {"answer": found if method == "walkthrough" else None}


def _limit_memory(num_bytes: int | None) -> None:
    """Limit what this process may allocate beyond what it has from the fork server."""
    if num_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            allocated = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (allocated + num_bytes,) * 2)


def json_line(value: Any) -> bytes:
    """A request or an answer as it is sent."""
    return json.dumps(value).encode() + b"\n"


def main(control: int) -> None:
    """Serve the env runner at the other end of a file descriptor."""
    for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C and a closed terminal are the driver's to handle
        signal.signal(number, signal.SIG_IGN)
    ForkServer(socket.socket(fileno=control)).serve()

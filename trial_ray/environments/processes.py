"""An environment in a process of its own: one that hangs, crashes or grows costs its rollout alone.

The process holds a :class:`~trial_ray.environments.guarded.GuardedEnv` and answers one request after the other. Requests and
answers are lines of JSON: nothing that the environment made is unpickled here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from trial_ray.environments.fork_server import CLOSE_SECONDS, END, REQUEST, START, json_line
from trial_ray.environments.guarded import MOST_CHARACTERS, StepResult, first_line
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.errors import EnvironmentFaultError

logger = logging.getLogger(__name__)

CREATION_FACTOR = 10
"""How much longer than a step the creation of an environment may take, which may import libraries and load data."""
MOST_BYTES = 16 * MOST_CHARACTERS
"""Longest answer; JSON writes a character as at most 12 bytes."""
CHUNK_BYTES = 1 << 16
SERVER = "import sys; sys.path[:] = sys.argv[2:]; from trial_ray.environments.fork_server import main; main(int(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of an environment's process.

    Attributes:
        step_timeout_s: seconds for one ``reset`` or ``step``; creation may take :data:`CREATION_FACTOR` times as long.
        memory_gb: GB that its process may allocate; ``None``: any number.
    """

    step_timeout_s: float
    memory_gb: float | None = None


class EnvProcesses:
    """The processes of one env runner, started by a :class:`~trial_ray.environments.fork_server.ForkServer`."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started = 0
        self._lock = threading.Lock()

    def start(self) -> tuple[int, socket.socket]:
        """Start a process; returns its number and the connection to it, which does not block.

        Raises:
            OSError: the fork server cannot be started, or died this moment.
        """
        connection, theirs = socket.socketpair()
        try:
            connection.setblocking(False)
            with self._lock, theirs:
                if self._server is None or self._server.poll() is not None:
                    self._start_server()
                assert self._control is not None
                self._started += 1
                socket.send_fds(self._control, [REQUEST.pack(START, self._started)], [theirs.fileno()])
                return self._started, connection
        except BaseException:
            connection.close()
            raise

    def end(self, number: int) -> None:
        """End a process where it is, and what it started."""
        with self._lock, suppress(OSError):  # without a server, it has ended
            if self._control is not None:
                self._control.send(REQUEST.pack(END, number))

    def close(self) -> None:
        """End all; environments whose connections were closed have :data:`CLOSE_SECONDS` to close."""
        with self._lock:
            if self._server is None or self._control is None:
                return
            self._control.close()
            try:
                self._server.wait(timeout=2 * CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()  # its processes die with it
                self._server.wait(timeout=CLOSE_SECONDS)
            self._server = self._control = None

    def _start_server(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(60)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )


class ProcessEnv:
    """One instance of a text environment in a process of its own, which is started at its first reset.

    Like :class:`~trial_ray.environments.guarded.GuardedEnv`, but its calls are awaited, and the event loop goes on meanwhile.

    Args:
        entry: the environment.
        required: keys that ``info`` must hold when an episode ends.
        processes: start and end the process.
        limits: of time and memory.

    Attributes:
        faulty: a call went wrong, or was given up; the process must be ended.
        max_turns: turns after which an episode is cut.
    """

    def __init__(
        self, entry: EnvironmentEntry, required: Collection[str], processes: EnvProcesses, limits: ProcessLimits
    ) -> None:
        self.faulty = False
        self.max_turns = entry.max_turns
        self._entry = entry
        self._required = tuple(required)
        self._processes = processes
        self._limits = limits
        self._number = 0
        self._connection: socket.socket | None = None
        self._task_id = ""
        self._turn = 0

    @property
    def name(self) -> str:
        """Name of the environment in records."""
        return self._entry.name

    async def make(self, task_id: str) -> ProcessEnv:
        """Start the process where there is none; see :meth:`~trial_ray.environments.guarded.GuardedEnv.make`.

        Raises:
            EnvironmentFaultError: as there, or the process ended, or did not answer in time.
        """
        self._task_id, self._turn = task_id, 0
        if self._connection is not None and _has_ended(self._connection):
            logger.warning("%s: its process ended between two episodes; another one is started", self._entry.env_id)
            self._end()
        if self._connection is None:
            await self._start()
        return self

    async def reset(self, task_id: str, seed: int) -> StepResult:
        """Start an episode; see :meth:`~trial_ray.environments.guarded.GuardedEnv.reset`.

        Raises:
            EnvironmentFaultError: as there, or the process ended, or did not answer in time.
        """
        await self.make(task_id)
        return StepResult(**await self._ask("reset", "reset", task_id, seed))

    async def step(self, action: str) -> StepResult:
        """Carry out an action; see :meth:`~trial_ray.environments.guarded.GuardedEnv.step`.

        Raises:
            EnvironmentFaultError: as there, or the process ended, or did not answer in time.
        """
        self._turn += 1
        return StepResult(**await self._ask(f"turn {self._turn}", "step", action))

    async def walkthrough(self) -> tuple[str, ...]:
        """The environment's own solution of the running task; see ``GuardedEnv.walkthrough``.

        Raises:
            EnvironmentFaultError: as there, or the process ended, or did not answer in time.
        """
        return tuple(await self._ask("walkthrough", "walkthrough"))

    def close(self) -> None:
        """Let the environment close and its process end, without waiting for it; end it where it is if it is faulty."""
        if self.faulty:
            self._end()
        elif self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _start(self) -> None:
        try:
            self._number, self._connection = self._processes.start()
        except OSError as error:
            raise self._fault("creation", f"no process could be started ({first_line(error)})") from error
        memory = self._limits.memory_gb
        setup = {
            "env_id": self._entry.env_id,
            "memory_bytes": None if memory is None else int(memory * 1e9),
            "environment": base64.b64encode(cloudpickle.dumps((self._entry, self._required))).decode(),
            "task_id": self._task_id,
        }
        await self._exchange("creation", setup, CREATION_FACTOR * self._limits.step_timeout_s)

    async def _ask(self, stage: str, method: str, *arguments: Any) -> Any:
        return await self._exchange(stage, [method, *arguments], self._limits.step_timeout_s)

    async def _exchange(self, stage: str, request: Any, timeout_s: float) -> Any:
        """Send a request and return its answer; whatever goes wrong meanwhile leaves the process unusable."""
        if self._connection is None:
            raise RuntimeError("no episode was started; call reset() first")
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                found = await _exchange_lines(self._connection, request)
            answered = "answer" in found
        except TimeoutError as error:
            raise self._fault(stage, f"no answer within {timeout_s:g} s; its process was ended") from error
        except (OSError, ValueError) as error:
            raise self._fault(stage, f"its process broke off ({first_line(error)})") from error
        finally:
            self.faulty = not answered  # also where the episode was given up while the environment worked
        if "fault" in found:
            raise EnvironmentFaultError(found["fault"])
        if "refused" in found:
            raise self._fault(stage, f"no process could be started ({found['refused']})")
        if not answered:
            raise self._fault(stage, f"its process ended {_how(found['ended'])}")
        return found["answer"]

    def _fault(self, stage: str, cause: str) -> EnvironmentFaultError:
        self.faulty = True
        told = f"{self._entry.env_id}, task {self._task_id!r}, {stage}: {cause}"
        logger.warning(told)
        return EnvironmentFaultError(told)

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._processes.end(self._number)


async def _exchange_lines(connection: socket.socket, request: Any) -> dict[str, Any]:
    """Send a line, and read one.

    Raises:
        ValueError: the answer is too long, or no JSON.
        OSError: the connection is closed.
    """
    loop = asyncio.get_running_loop()
    with suppress(ConnectionError):  # how the process ended is still to be read
        await loop.sock_sendall(connection, json_line(request))
    received = bytearray()
    chunk = b""
    while b"\n" not in chunk:
        try:
            chunk = await loop.sock_recv(connection, CHUNK_BYTES)
        except ConnectionResetError:  # it ended before it had read the request
            chunk = b""
        if not chunk:
            raise ConnectionError("it ended")
        received += chunk
        if len(received) > MOST_BYTES:
            raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
    found: dict[str, Any] = json.loads(received.partition(b"\n")[0])
    return found


def _has_ended(connection: socket.socket) -> bool:
    """Whether a process that was asked nothing has ended: only then there is anything to read."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _how(status: int) -> str:
    """How a process ended, from its exit status, which is negative for a signal."""
    if status >= 0:
        return f"with exit status {status}"
    hint = ", as the system does where memory is short" if -status == signal.SIGKILL else ""
    name = (
        signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    )  # real-time ones have no name
    return f"by signal {name}{hint}"

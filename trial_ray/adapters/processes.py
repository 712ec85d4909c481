"""Environments in separate processes: a hang, a crash or memory growth costs only the rollout of that environment.

Each process runs a :class:`~trial_ray.adapters.guarded.GuardedEnv` and answers one request at a time. Requests and answers
are lines of JSON, so the env runner unpickles nothing that the environment created.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import resource
import signal
import socket
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from ray import cloudpickle

from trial_envs.core.fork_server import ForkedProcesses, ask, json_line, serve
from trial_envs.program import ChatCall
from trial_ray.adapters.guarded import MAX_CHARACTERS, GuardedEnv, StepResult, first_line
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.errors import EnvironmentFaultError

logger = logging.getLogger(__name__)

CREATION_FACTOR = 10
"""The creation of an environment, which may import libraries and load data, may take this many times as long as a step."""
MAX_BYTES = 16 * MAX_CHARACTERS
"""Maximum size, in bytes, of an answer of an environment's process; JSON writes a character as at most 12 bytes."""

EnvProcesses = partial(ForkedProcesses, __name__)
"""Fork server for the environment processes of one env runner. The server has imported the modules that every environment
needs, but has created no environment."""


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of an environment's process.

    Attributes:
        step_timeout_s: seconds for one ``reset`` or ``step``; creation may take :data:`CREATION_FACTOR` times as long.
        memory_gb: GB that the process may allocate, or ``None`` for no limit.
    """

    step_timeout_s: float
    memory_gb: float | None = None


class ProcessEnv:
    """One instance of a text environment in a separate process, which is started at its first reset.

    It is used like :class:`~trial_ray.adapters.guarded.GuardedEnv`, but its calls are awaited and do not block the event loop.

    Args:
        entry: the environment.
        required: keys that ``info`` must contain at the end of an episode.
        processes: server that forks the process.
        limits: limits of time and memory.
        keep_info: whether results contain ``info``.

    Attributes:
        name: name of the environment in recorded trajectories.
        faulty: whether a call failed or was cancelled; the process must then be ended.
        max_turns: number of turns at which an episode is truncated.
    """

    def __init__(
        self,
        entry: EnvironmentEntry,
        required: Collection[str],
        processes: ForkedProcesses,
        limits: ProcessLimits,
        keep_info: bool = False,
    ) -> None:
        self.name = entry.name
        self.faulty = False
        self.max_turns = entry.max_turns
        self._entry = entry
        self._arguments = (entry, tuple(required), keep_info)
        self._processes = processes
        self._limits = limits
        self._connection: socket.socket | None = None
        self._task_id = ""
        self._turn = 0

    async def make(self, task_id: str) -> ProcessEnv:
        """Start the process if it is not running; see :meth:`~trial_ray.adapters.guarded.GuardedEnv.make`.

        Raises:
            EnvironmentFaultError: as in ``GuardedEnv``, or the process ended or did not answer in time.
        """
        self._task_id, self._turn = task_id, 0
        if self._connection is not None and _has_ended(self._connection):
            logger.warning("%s: its process ended between two episodes; a new process is started", self._entry.env_id)
            self.close()
        if self._connection is None:
            await self._start()
        return self

    async def reset(self, task_id: str, seed: int) -> StepResult:
        """Start an episode; see :meth:`~trial_ray.adapters.guarded.GuardedEnv.reset`.

        Raises:
            EnvironmentFaultError: as in ``GuardedEnv``, or the process ended or did not answer in time.
        """
        await self.make(task_id)
        return _result(await self._exchange("reset", ["reset", task_id, seed]))

    async def step(self, action: str) -> StepResult:
        """Carry out an action; see :meth:`~trial_ray.adapters.guarded.GuardedEnv.step`.

        Raises:
            EnvironmentFaultError: as in ``GuardedEnv``, or the process ended or did not answer in time.
        """
        self._turn += 1
        return _result(await self._exchange(f"turn {self._turn}", ["step", action]))

    async def walkthrough(self) -> tuple[str, ...]:
        """Return the environment's own solution of the running task; see ``GuardedEnv.walkthrough``.

        Raises:
            EnvironmentFaultError: as in ``GuardedEnv``, or the process ended or did not answer in time.
        """
        return tuple(await self._exchange("walkthrough", ["walkthrough"]))

    async def is_waiting(self) -> bool:
        """Return whether an agent program still waits for the answer to its chat request.

        Raises:
            EnvironmentFaultError: as in ``GuardedEnv``, or the process ended or did not answer in time.
        """
        return bool(await self._exchange("is_waiting", ["is_waiting"]))

    def close(self) -> None:
        """Close the connection to the process, without waiting; the process then closes the environment and ends."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _start(self) -> None:
        try:
            self._connection = self._processes.start()
        except OSError as error:
            raise self._fault("creation", f"no process could be started ({first_line(error)})") from error
        memory = self._limits.memory_gb
        setup = {
            "env_id": self._entry.env_id,
            "memory_bytes": None if memory is None else int(memory * 1e9),
            "environment": base64.b64encode(cloudpickle.dumps(self._arguments)).decode(),
            "task_id": self._task_id,
        }
        await self._exchange("creation", setup, CREATION_FACTOR)

    async def _exchange(self, stage: str, request: Any, factor: int = 1) -> Any:
        """Send a request and return its answer; any failure makes the process unusable.

        Args:
            stage: stage of the episode, which error messages name.
            request: request that the process reads.
            factor: multiple of the time limit that the answer may take.
        """
        if self._connection is None:
            raise RuntimeError("No episode was started; call reset() first.")
        answered, timeout_s = False, factor * self._limits.step_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await ask(self._connection, request, MAX_BYTES)
            answered = "answer" in response
        except TimeoutError as error:
            raise self._fault(stage, f"no answer within {timeout_s:g} s; its process was ended") from error
        except (OSError, ValueError) as error:
            raise self._fault(stage, f"the connection to its process broke ({first_line(error)})") from error
        finally:
            # An error, or a cancelled wait for the answer, leaves the process in an unknown state.
            self.faulty = not answered
        if "fault" in response:
            raise EnvironmentFaultError(response["fault"], response["calls"])
        if "refused" in response:
            raise self._fault(stage, f"no process could be started ({response['refused']})")
        if not answered:
            raise self._fault(stage, f"its process ended {_describe_exit(response['ended'])}")
        return response["answer"]

    def _fault(self, stage: str, cause: str) -> EnvironmentFaultError:
        self.faulty = True
        message = f"{self._entry.env_id}, task {self._task_id!r}, {stage}: {cause}"
        logger.warning(message)
        return EnvironmentFaultError(message)


def _result(answer: dict[str, Any]) -> StepResult:
    call = answer.pop("call")
    return StepResult(**answer, call=None if call is None else ChatCall(**call))


def _has_ended(connection: socket.socket) -> bool:
    """Return whether a process has ended. Without a pending request, its connection becomes readable only when it ends."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _describe_exit(status: int) -> str:
    """Describe how a process ended, from its exit status, which is negative for a signal."""
    if status >= 0:
        return f"with exit status {status}"
    hint = ", as the system does when memory is short" if -status == signal.SIGKILL else ""
    # Real-time signals have no name.
    name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
    return f"by signal {name}{hint}"


# -- code that runs in the environment's process ----------------------------------------------------------------------


def answer_requests(connection: socket.socket) -> None:
    """Create the environment that the first received line describes, then answer a request per line until the connection closes."""
    lines = connection.makefile("rb")
    if not (line := lines.readline()):
        return
    setup = json.loads(line)
    np.random.seed()  # Without a new seed, all forks would draw the same numbers.
    try:
        _limit_memory(setup["memory_bytes"])
        arguments = cloudpickle.loads(base64.b64decode(setup["environment"]))
    except Exception as error:
        fault = f"{setup['env_id']}, task {setup['task_id']!r}, creation: {first_line(error)}"
        connection.sendall(json_line({"fault": fault, "calls": {}}))
        return
    env = GuardedEnv(*arguments)
    connection.sendall(json_line(_outcome(env, "make", [setup["task_id"]])))
    while line := lines.readline():
        method, *arguments = json.loads(line)
        connection.sendall(json_line(_outcome(env, method, arguments)))
    env.close()


def _outcome(env: GuardedEnv, method: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        result = getattr(env, method)(*arguments)
    except EnvironmentFaultError as error:
        return {"fault": str(error), "calls": error.calls}
    if isinstance(result, StepResult):
        return {"answer": asdict(result)}
    return {"answer": None if method == "make" else result}


def _limit_memory(num_bytes: int | None) -> None:
    """Limit the memory that this process may allocate in addition to the memory of the fork server."""
    if num_bytes is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            allocated = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (allocated + num_bytes,) * 2)


def main(control: int) -> None:
    """Fork environment processes for an env runner, which is connected to the socket ``control``."""
    serve(socket.socket(fileno=control), answer_requests)

"""What runs in the process of an environment: it answers requests for one :class:`GuardedEnv`, a line of JSON each."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import socket
from dataclasses import fields
from typing import Any

import numpy as np
from ray import cloudpickle

from trial_ray.environments.guarded_env import GuardedEnv, StepResult, first_line
from trial_ray.errors import EnvironmentFaultError

CLOSE_SECONDS = 2
"""How long an environment may take to close before its process is ended."""
ANSWERED = tuple(field.name for field in fields(StepResult))


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
        told = f"{setup['env_id']}, task {setup['task_id']!r}, creation: {first_line(error)}"
        connection.sendall(json_line({"fault": told}))
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
        return {"answer": {name: getattr(found, name) for name in ANSWERED}}
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

"""The fork server of an OpenEnv server: a program that makes the environment once and forks itself for every session.

The process of a session therefore starts with the engine imported and its caches filled.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium

import trial_envs
from trial_envs.core import TextEnv
from trial_envs.core.fork_server import json_line, serve

READY = b"R"
"""Message of the fork server once it has made the environment; any other message is the text of an error."""
MAX_BYTES = 1 << 16
"""Maximum length in bytes of a message of the fork server."""
INFO = ("task", "task_id", "family", "admissible_actions", "won", "score", "invalid_action")


def prepare(env_id: str, settings: Mapping[str, Any]) -> TextEnv:
    """Make the environment and start an episode, to load all data that episodes share.

    Raises:
        TypeError: the environment is not a text environment, or cannot be forked.
    """
    trial_envs.register()
    env = gymnasium.make(env_id, disable_env_checker=True, **settings).unwrapped
    if not isinstance(env, TextEnv):
        raise TypeError(f"{env_id} is a {type(env).__name__}, expected a TextEnv of trial_envs.")
    env.reset(options={"task": 0})  # Drawing a task would create a random generator that all sessions inherit.
    if threading.active_count() > 1:
        env.close()
        raise TypeError(f"{env_id} starts threads, so its process cannot be forked for sessions.")
    return env


def answer_requests(connection: socket.socket, env: TextEnv) -> None:
    """Answer lines of JSON, ``["reset", seed, task]`` or ``["step", action]``, until the connection is closed."""
    with suppress(ConnectionError):
        for line in connection.makefile("rb"):
            connection.sendall(json_line(answer(env, *json.loads(line))))
    env.close()


def answer(env: TextEnv, method: str, *arguments: Any) -> dict[str, Any]:
    """Return the fields of the observation after ``reset`` or ``step``; after an exception, only ``error`` with its text."""
    reward, terminated, truncated = None, False, False
    try:
        if method == "reset":
            seed, task = arguments
            text, info = env.reset(seed=seed, options=None if task is None else {"task": task})
        else:
            text, reward, terminated, truncated, info = env.step(*arguments)
    except Exception as error:  # The engine of an environment may raise any exception.
        return {"error": f"{type(error).__name__}: {error}"}
    ends = {"reward": reward, "done": terminated or truncated, "truncated": truncated}
    return {"text": text, **{key: info[key] for key in INFO}, **ends}


def main(descriptor: int, env_id: str, settings: Mapping[str, Any]) -> None:
    """Make the environment, send :data:`READY` or the error over the socket ``descriptor``, then fork processes on request."""
    with socket.socket(fileno=descriptor) as control:
        try:
            env = prepare(env_id, settings)
        except Exception as error:
            control.send(f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:MAX_BYTES])
            return
        control.send(READY)
        serve(control, partial(answer_requests, env=env))

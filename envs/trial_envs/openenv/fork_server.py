"""The program that starts the processes of sessions: it makes the environment once, and forks itself for every session.

It has one thread and plays nothing itself, so a fork is safe, takes milliseconds, and finds the engine imported and its caches
filled. It ends when the server closes the connection or dies, and every session's process with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import gymnasium

import trial_envs
from trial_envs.core import TextEnv

START = b"S"
"""What the server sends, with the session's end of a connection."""
PID = struct.Struct("=q")
"""What goes back on that connection, with a pidfd; another message says why no process was started."""
CLOSE_SECONDS = 2
"""Time in which an environment must close before its process is ended."""
MOST_BYTES = 1 << 16
"""Longest message of this program."""
INFO = ("task", "task_id", "family", "admissible_actions", "won", "score", "invalid_action")
_PR_SET_PDEATHSIG = 1


def prepare(env_id: str, settings: Mapping[str, Any]) -> TextEnv:
    """Make the environment and start an episode, so that all that episodes share is loaded.

    Raises:
        TypeError: it is no text environment, or cannot be forked.
    """
    trial_envs.register()
    env = gymnasium.make(env_id, disable_env_checker=True, **settings).unwrapped
    if not isinstance(env, TextEnv):
        raise TypeError(f"{env_id} is a {type(env).__name__}, expected a TextEnv of trial_envs")
    env.reset(options={"task": 0})  # a drawn task would leave a generator that every session inherits
    if threading.active_count() > 1:
        env.close()
        raise TypeError(f"{env_id} starts threads, so that its process cannot be forked for sessions")
    return env


def serve(control: socket.socket, env: TextEnv) -> None:
    """Start processes until the server has closed the connection; return when they have ended, or had time to."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, len(START), 1)
        except ConnectionError:
            break
        if not message:
            break
        if (
            descriptors
        ):  # none where this process has no descriptor left: the connection was closed, which its owner sees
            with socket.socket(fileno=descriptors[0]) as connection:
                _start(connection, control, env)
    signal.alarm(CLOSE_SECONDS)  # ends this process, and with it those that do not end
    with suppress(ChildProcessError):
        os.wait()


def _start(connection: socket.socket, control: socket.socket, env: TextEnv) -> None:
    server = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_session(connection, server, env)
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(connection, [PID.pack(pid)], [pidfd])
        finally:
            os.close(pidfd)
    except OSError as error:  # memory, process ids, descriptors; or the session was given up
        with suppress(OSError):
            connection.send(str(error).encode()[:MOST_BYTES])


def _become_session(connection: socket.socket, server: int, env: TextEnv) -> NoReturn:
    """Answer for one session until its connection is closed; does not return."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it died before the line above
            answer_requests(connection, env)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)


def answer_requests(connection: socket.socket, env: TextEnv) -> None:
    """Answer lines of JSON, ``["reset", seed, task]`` or ``["step", action]``, until the connection is closed."""
    with suppress(ConnectionError):
        for line in connection.makefile("rb"):
            connection.sendall(json.dumps(answer(env, *json.loads(line))).encode() + b"\n")
    signal.alarm(CLOSE_SECONDS)
    env.close()


def answer(env: TextEnv, method: str, *arguments: Any) -> dict[str, Any]:
    """Fields of an observation after ``reset`` or ``step``, or ``error``; the session goes on after an error."""
    reward, terminated, truncated = None, False, False
    try:
        if method == "reset":
            seed, task = arguments
            text, info = env.reset(seed=seed, options=None if task is None else {"task": task})
        else:
            text, reward, terminated, truncated, info = env.step(*arguments)
    except Exception as error:  # an engine may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    ends = {"reward": reward, "done": terminated or truncated, "truncated": truncated}
    return {"text": text, **{key: info[key] for key in INFO}, **ends}


def main(descriptor: int, env_id: str, settings: Mapping[str, Any]) -> None:
    """Prepare the environment, say so or why not, and serve the other end of a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    with socket.socket(fileno=descriptor) as control:
        try:
            env = prepare(env_id, settings)
        except Exception as error:
            control.send(f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:MOST_BYTES])
            return
        control.send(START)
        serve(control, env)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))

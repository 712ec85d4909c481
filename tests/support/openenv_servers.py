"""Servers for tests of OpenEnv: ours in a process of its own, and one that misbehaves in a thread."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager

import psutil
from websockets.sync.server import serve

START_SECONDS = 120.0
END_SECONDS = 20.0
GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 64}
COMMAND = [sys.executable, "-m", "trial_envs.openenv", "trial/ALFWorld-v0"]


class Served:
    """A running ``python -m trial_envs.openenv`` with games of ALFWorld.

    Attributes:
        url: of the server.
        process: of the server.
    """

    def __init__(self, *arguments):
        settings = [f"--set={key}={json.dumps(value)}" for key, value in GAMES.items()]
        self.process = subprocess.Popen([*COMMAND, *settings, *arguments], stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(START_SECONDS, self.process.kill)
        timer.start()
        told = self.process.stdout.readline()
        timer.cancel()
        assert told, "the server ended or took too long to start"
        self.url = json.loads(told)["url"]

    def family(self):
        """All processes that the server started, at any depth."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def sessions(self):
        """Process ids of the sessions."""
        (forks,) = psutil.Process(self.process.pid).children()
        return {child.pid for child in forks.children()}

    def stop(self, signal_number):
        """Send a signal; what is left of the server's processes when there was time to end."""
        family = self.family()
        self.process.send_signal(signal_number)
        self.process.wait(END_SECONDS)
        self.process.stdout.close()
        return psutil.wait_procs(family, timeout=END_SECONDS)[1]


@contextmanager
def misbehaving(answer):
    """The URL of a WebSocket server in a thread that calls ``answer`` for every message."""

    def talk(connection):
        for message in connection:
            answer(connection, json.loads(message))

    with serve(talk, "127.0.0.1", 0, max_size=None, close_timeout=1) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
    thread.join(END_SECONDS)
    assert not thread.is_alive()


def observation(reward=None, done=False, **fields):
    """The message of a server's answer."""
    return json.dumps({"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}})

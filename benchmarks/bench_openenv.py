"""What a process for every session of an OpenEnv server costs and gains, against all sessions in threads of one process.

    make test-peers PEERS=openenv   # makes the environment that this runs in
    .venv-peers/openenv/bin/python benchmarks/bench_openenv.py --json benchmarks/results/openenv.json

Both servers are OpenEnv's own, over the same generated households, and one client process plays all sessions at once with
OpenEnv's client: other games in every round, and actions drawn from the admissible ones. A session is counted from its
connection to its first observation. The servers take turns, and the median of the rounds counts. On few cores, client and
server wait for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import psutil
from measure import Measure, write_report
from openenv.core import GenericEnvClient

GAMES = {"split": "generated", "difficulty": "tiny", "num_games": 4096, "max_turns": 1_000_000}
ENV_ID = "trial/ALFWorld-v0"
COUNTS = (1, 8, 64)
ROUNDS, STEPS = 3, 30
START_SECONDS = 120.0


def serve_threads() -> None:
    """OpenEnv's server with the plain environment, one instance a session, each in a thread of this process."""
    import socket

    import uvicorn
    from openenv.core.env_server import Environment, create_fastapi_app

    from trial_envs.openenv.fork_server import answer, prepare
    from trial_envs.openenv.session import EpisodeState, TextAction, TextObservation

    class ThreadSession(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = EpisodeState()

        def __init__(self) -> None:
            super().__init__()
            self._env = gymnasium.make(ENV_ID, disable_env_checker=True, **GAMES).unwrapped

        def reset(self, seed=None, episode_id=None, task=None):
            return TextObservation(**answer(self._env, "reset", seed, task))

        def step(self, action, timeout_s=None):
            return TextObservation(**answer(self._env, "step", action.action))

        def close(self):
            self._env.close()

    prepare(ENV_ID, GAMES).close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        app = create_fastapi_app(ThreadSession, TextAction, TextObservation, max_concurrent_envs=max(COUNTS) + 1)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


class Server:
    """A server in a process of its own."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = json.loads(self.process.stdout.readline())["url"]

    def sessions(self) -> list[psutil.Process]:
        """The sessions' processes."""
        return [child for forks in psutil.Process(self.process.pid).children() for child in forks.children()]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        finally:
            self.process.kill()


def servers() -> dict[str, Server]:
    settings = [f"--set={key}={json.dumps(value)}" for key, value in GAMES.items()]
    limit = f"--max-sessions={max(COUNTS) + 1}"
    return {
        "processes": Server([sys.executable, "-m", "trial_envs.openenv", ENV_ID, *settings, limit]),
        "threads": Server([sys.executable, __file__, "--serve-threads"]),
    }


class Player:
    """A session that starts with its first observation, and takes drawn actions.

    Attributes:
        seconds: what each of its steps took.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.seconds: list[float] = []
        self._client = GenericEnvClient(base_url=url)
        self._seed, self._draw = seed, random.Random(seed)

    async def start(self) -> None:
        await self._client.connect()
        self._result = await self._client.reset(seed=self._seed)

    async def play(self) -> None:
        self.seconds.clear()
        for _ in range(STEPS):
            if self._result.done:
                self._result = await self._client.reset(seed=self._seed)
            action = self._draw.choice(self._result.observation["admissible_actions"])
            began = time.perf_counter()
            self._result = await self._client.step({"action": action})
            self.seconds.append(time.perf_counter() - began)

    async def close(self) -> None:
        await self._client.close()


async def start_players(server: Server, count: int, seed: int) -> list[Player]:
    players = [Player(server.url, seed + index) for index in range(count)]
    await asyncio.gather(*[player.start() for player in players])
    return players


async def rates(server: Server, count: int, seed: int) -> tuple[float, float]:
    """Sessions started a second, and steps of all of them a second."""
    began = time.perf_counter()
    players = await start_players(server, count, seed)
    started = time.perf_counter()
    await asyncio.gather(*[player.play() for player in players])
    ended = time.perf_counter()
    await asyncio.gather(*[player.close() for player in players])
    await until_free(server)
    return count / (started - began), count * STEPS / (ended - started)


async def until_free(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.sessions() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


async def kill_one(server: Server, kill: Callable[[Server], None], count: int = 8) -> tuple[int, float, float]:
    """Sessions beside the killed one that are lost; the others' slowest step before and after, in seconds."""
    players = await start_players(server, count, seed=0)
    await asyncio.gather(*[player.play() for player in players])
    before = max(max(player.seconds) for player in players)
    kill(server)
    ended = await asyncio.gather(*[player.play() for player in players], return_exceptions=True)
    after = [max(player.seconds) for player, error in zip(players, ended, strict=True) if error is None]
    await asyncio.gather(*[player.close() for player in players], return_exceptions=True)
    return count - 1 - len(after), before, max(after, default=float("nan"))


def measures_of(found: dict[tuple[str, int], list[tuple[float, float]]]) -> list[Measure]:
    measures = []
    for index, name in enumerate(("sessions started", "steps")):
        for count in COUNTS:
            ours, other = (
                statistics.median(each[index] for each in found[kind, count]) for kind in ("processes", "threads")
            )
            note = f"{ours:.3g} 1/s in processes, {other:.3g} 1/s in threads"
            label = "1 session" if count == 1 else f"{count} sessions"
            measures.append(
                Measure(f"OpenEnv server, {label}: {name} a second against threads", ours / other, note=note)
            )
    return measures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve-threads", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_threads:
        serve_threads()
        return
    running = servers()
    try:
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for count in COUNTS:
            for number in range(ROUNDS):
                seed = 1000 * len(found) + 100 * number
                for kind in sorted(running, reverse=bool(number % 2)):
                    found.setdefault((kind, count), []).append(asyncio.run(rates(running[kind], count, seed)))
        kills = {
            "processes": lambda server: server.sessions()[0].kill(),
            "threads": lambda server: os.kill(server.process.pid, signal.SIGKILL),
        }
        killed = {kind: asyncio.run(kill_one(running[kind], kill)) for kind, kill in kills.items()}
    finally:
        for server in running.values():
            server.stop()
    measures = measures_of(found)
    lost, before, after = killed["processes"]
    measures += [
        Measure("OpenEnv server: sessions lost beside a killed one, of 7", lost, "", 0, "lower",
                note=f"{killed['threads'][0]} where all are threads of the killed process"),
        Measure("OpenEnv server: slowest step of the others after the kill", after, "s", note=f"{before:.3g} s before it"),
    ]  # fmt: skip
    details = {f"{kind}, {count}": values for (kind, count), values in found.items()}
    write_report(args.json, measures, {"sessions_and_steps_per_s": details, "killed": killed})


if __name__ == "__main__":
    main()

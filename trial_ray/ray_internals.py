"""Private parts of Ray and RLlib: each function says why no public one serves, and is tested against the pinned versions."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

from ray._private import ray_constants, services, state, utils
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined]  # compiled
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    GcsClient,
    persist_port,
)
from ray.actor import ActorHandle
from ray.rllib.algorithms import Algorithm, algorithm
from ray.rllib.core.learner.learner_group import LearnerGroup
from ray.rllib.env.env_runner_group import EnvRunnerGroup

START_S = 180.0
"""How long a local Ray may take to start. Ray gives itself 30 s, which cannot be set, and a busy machine needs more."""
IDLE_AGENT = "import os, time\nraylet = os.getppid()\nwhile os.getppid() == raylet:\n    time.sleep(1)"
AGENT_PORTS = {
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
}
"""Arguments of ``start_raylet`` by the names under which the agent writes these ports."""


class RestartableGroup(EnvRunnerGroup):
    """Env runners that Ray can restart for as long as they live: each is given the config itself, some 20 kB.

    RLlib gives a reference, behind which nothing is left once the group has gone; Ray warns of it at each env runner.
    """

    def _make_worker(self, *, worker_index: int, config: Any, **arguments: Any) -> Any:
        held = self._remote_config if worker_index else config
        return super()._make_worker(worker_index=worker_index, config=held, **arguments)


def env_runner_actors(runners: EnvRunnerGroup | None) -> dict[int, ActorHandle[Any]]:
    """The remote env runners by index. RLlib's own calls end a runner that raises, and lose what it raised."""
    return {} if runners is None else dict(runners._worker_manager.actors())


def mark_lost(runners: EnvRunnerGroup, index: int) -> None:
    """Give an env runner nothing more to do until Ray has restarted it. RLlib marks only runners that its own calls lost."""
    runners._worker_manager.set_actor_state(index, healthy=False)


def start_env_runner(runners: EnvRunnerGroup, index: int) -> ActorHandle[Any]:
    """Ask Ray for one env runner more, without waiting for it; it joins by :func:`add_env_runner`.

    RLlib's ``add_workers`` counts it as one that can play from the start, which may be long before a node has room for it.
    """
    handle: ActorHandle[Any] = runners._make_worker(
        env_creator=runners._env_creator,
        validate_env=None,
        worker_index=index,
        num_workers=index,
        config=runners._remote_config_obj_ref,
    )
    return handle


def add_env_runner(runners: EnvRunnerGroup, handle: ActorHandle[Any]) -> int:
    """Make an env runner one of the group; returns its index."""
    runners._worker_manager.add_actors([handle])
    return int(max(runners._worker_manager.actor_ids()))


def draining_nodes() -> set[str]:
    """Ids of nodes that will be taken away: Ray places nothing more there. Its public interfaces do not say."""
    return {*state.state.get_draining_nodes()}


def count_dropped(runners: EnvRunnerGroup) -> None:
    """Count an env runner that was late under the metric of RLlib, which counts those of its own calls."""
    runners._num_env_runners_dropped_lifetime += 1


def learner_actors(learners: LearnerGroup | None) -> list[Any]:
    """The remote learners by rank. RLlib's update waits for all of them where one has failed."""
    return [] if learners is None or learners.is_local else list(learners._workers)


def actor_id(handle: ActorHandle[Any]) -> str:
    """Ray's id of an actor, hexadecimal, under which its process publishes its progress; only the actor itself may ask."""
    return str(handle._actor_id.hex())


def without_termination_handler() -> AbstractContextManager[Any]:
    """Keep Ray from setting its handler of SIGTERM, which ends the process wherever it is, without a record of the run."""
    return patch.object(utils, "set_sigterm_handler", lambda handler: None)


def stop_of_tune(event: threading.Event) -> AbstractContextManager[Any]:
    """Let an event stop Tune between two steps, in place of its handler of SIGINT, which gives the signal up after the first."""
    return patch.object(import_module("ray.tune.tune"), "_setup_signal_catching", lambda: event)


@contextmanager
def local_start() -> Iterator[None]:
    """Start a Ray that only this machine reaches, without autoscaler, API server and metrics, however slowly.

    Ray reads the environment variable for the first when it is imported; it would wait for the rest, which nothing uses. Nor is
    the agent used that the dashboard has on each node: a raylet ends with its agent, so one that does nothing takes its place.
    """
    command: Callable[..., list[str]] = services._build_python_executable_command_memory_profileable

    def idle_agent(component: str, *arguments: Any, **named: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-S", "-c", IDLE_AGENT]
        return command(component, *arguments, **named)

    with (
        slow_start(),
        patch.object(services, command.__name__, idle_agent),
        patch.multiple(Node, start_monitor=DEFAULT, start_api_server=DEFAULT),
        patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False),
    ):
        yield


@contextmanager
def slow_start() -> Iterator[None]:
    """Wait :data:`START_S` for a node that this process starts; ports of agents that are not given are not to be had."""
    get_node: Callable[[str, str], Any] = services.get_node
    start_raylet: Callable[..., Any] = services.start_raylet

    def started_node(address: str, node_id: str) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return get_node(address, node_id)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def raylet_with_ports(*arguments: Any, **named: Any) -> Any:
        # It would end where an agent takes longer than 15 s to write its port into a file (Ray's issue 65983).
        with socket.socket() as unused:
            unused.bind(("", 0))
            named["runtime_env_agent_port"] = unused.getsockname()[1]
        given = signature(start_raylet).bind(*arguments, **named).arguments
        for name, port in AGENT_PORTS.items():
            persist_port(given["session_dir"], given["node_id"], name, given.get(port) or -1)
        return start_raylet(*arguments, **named)

    limits = {"RAY_gcs_server_port_wait_time_s": START_S, "RAY_agent_register_timeout_ms": 1000 * START_S}
    with (
        patch.dict(os.environ, {name: f"{limit:.0f}" for name, limit in limits.items()}),
        patch.object(services, "start_raylet", raylet_with_ports),
        patch.object(services, "get_node", started_node),
    ):
        yield


def connect_to_head(address: str) -> None:
    """Connect to a head as ``ray.init`` does, which would try for two minutes.

    Raises:
        ray.exceptions.AuthenticationError: the head refuses the token of this process.
        ray.exceptions.RpcError: it is no head.
    """
    GcsClient(address=address)


def trial_folder(algorithm: Algorithm) -> Path | None:
    """The folder of the Tune trial that an algorithm is; ``None`` if it is none. Tune tells function trainables alone."""
    return None if algorithm._storage is None else Path(algorithm._storage.trial_fs_path)


def checkpoints_of(trial: Any) -> list[Any]:
    """The checkpoints that Tune keeps of a trial, in order, each with the metrics of its iteration. Tune shows the newest alone."""
    return list(trial.run_metadata.checkpoint_manager._checkpoint_results)


@contextmanager
def env_runners_of(
    kept: EnvRunnerGroup | None, number: int, make: Callable[..., EnvRunnerGroup] = EnvRunnerGroup
) -> Iterator[None]:
    """Let RLlib's ``Algorithm.setup`` take the env runners that were kept, or make so many in a group of this class; it makes as
    many as the config says, in its own.

    To start new env runners takes longer than a short trial of a sweep. Nor does it call ``on_algorithm_init``, which it would
    while nothing that this package adds is there.
    """
    made = algorithm.EnvRunnerGroup

    def take(**arguments: Any) -> EnvRunnerGroup:
        if kept is None:
            return make(**arguments, num_env_runners=number)
        kept._worker_manager._num_actor_restarts = kept._num_env_runners_dropped_lifetime = 0
        return kept

    algorithm.EnvRunnerGroup = take
    try:
        with patch.object(algorithm, "make_callback", lambda hook, *args, **kwargs: None):
            yield
    finally:
        algorithm.EnvRunnerGroup = made

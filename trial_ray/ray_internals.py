"""Uses of private parts of Ray, tested against the pinned version; docstrings explain why no public API is enough.

Uses of private parts of RLlib are in ``rllib_internals``, so that engines start without importing RLlib, which takes longer than
importing Ray.
"""

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

START_S = 180.0
"""Time limit for the start of a local Ray. Ray's own limit of 30 s cannot be set, and is too short on a busy machine."""
IDLE_AGENT = "import os, time\nraylet = os.getppid()\nwhile os.getppid() == raylet:\n    time.sleep(1)"
AGENT_PORTS = {
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
}
"""Arguments of Ray's ``start_raylet`` for the ports of a node's agent, by the names under which Ray stores ports in files."""


def container_memory() -> int:
    """Return the bytes of memory left in this process's container, or else on the machine; Ray has no public function for it."""
    return int(utils.estimate_available_memory())


def draining_nodes() -> set[str]:
    """Return the ids of nodes that will be removed; Ray places nothing more on them. Ray's public API does not expose them."""
    return {*state.state.get_draining_nodes()}


def actor_id(handle: ActorHandle[Any]) -> str:
    """Return Ray's hexadecimal id of an actor, the key of its published progress; outside the actor, no public API gives it."""
    return str(handle._actor_id.hex())


def without_termination_handler() -> AbstractContextManager[Any]:
    """Keep Ray from setting its SIGTERM handler, which would end the process before the end of the run is recorded."""
    return patch.object(utils, "set_sigterm_handler", lambda handler: None)


def stop_of_tune(event: threading.Event) -> AbstractContextManager[Any]:
    """Make Tune stop between two steps when ``event`` is set.

    This replaces Tune's SIGINT handler, which Tune removes after the first signal.
    """
    return patch.object(import_module("ray.tune.tune"), "_setup_signal_catching", lambda: event)


@contextmanager
def local_start() -> Iterator[None]:
    """Let Ray start for this machine only, with :func:`slow_start`, and without autoscaler, API server and metrics.

    A constant of Ray is patched to restrict Ray to the loopback address, because Ray reads the environment variable for this
    only when it is imported. The omitted services are not used here, but Ray would wait for them. The dashboard's agent is not
    used either; since a raylet ends with its agent, an idle process replaces the agent.
    """
    command: Callable[..., list[str]] = services._build_python_executable_command_memory_profileable

    def idle_agent(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-S", "-c", IDLE_AGENT]
        return command(component, *arguments, **options)

    with (
        slow_start(),
        patch.object(services, command.__name__, idle_agent),
        patch.multiple(Node, start_monitor=DEFAULT, start_api_server=DEFAULT),
        patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False),
    ):
        yield


@contextmanager
def slow_start() -> Iterator[None]:
    """Let a Ray node take up to :data:`START_S` to start, without waiting for its agent to report ports."""
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

    def raylet_with_ports(*arguments: Any, **options: Any) -> Any:
        # The raylet would end if an agent took longer than 15 s to write its port into a file (Ray issue 65983).
        with socket.socket() as unused:
            unused.bind(("", 0))
            options["runtime_env_agent_port"] = unused.getsockname()[1]
        bound = signature(start_raylet).bind(*arguments, **options).arguments
        for name, port in AGENT_PORTS.items():
            # For Ray, port -1 means that the service is not available.
            persist_port(bound["session_dir"], bound["node_id"], name, bound.get(port) or -1)
        return start_raylet(*arguments, **options)

    limits = {
        "RAY_gcs_server_port_wait_time_s": f"{START_S:.0f}",
        "RAY_agent_register_timeout_ms": f"{1000 * START_S:.0f}",
    }
    with (
        patch.dict(os.environ, limits),
        patch.object(services, "start_raylet", raylet_with_ports),
        patch.object(services, "get_node", started_node),
    ):
        yield


def connect_to_head(address: str) -> None:
    """Connect to a cluster's head node as ``ray.init`` does, but without its two minutes of retries.

    Raises:
        ray.exceptions.AuthenticationError: the head node rejects the token of this process.
        ray.exceptions.RpcError: the program at the address is not a head node.
    """
    GcsClient(address=address)


def checkpoints_of(trial: Any) -> list[Any]:
    """Return the checkpoints of a Tune trial, oldest first, with their metrics; a trial's public API gives only the last."""
    return list(trial.run_metadata.checkpoint_manager._checkpoint_results)

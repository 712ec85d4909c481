"""Connection of a command to Ray: to the cluster in ``RAY_ADDRESS``, else to a local cluster that ends with the command."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trial_ray.errors import ClusterError, InfrastructureError, first_line
from trial_ray.termination import end_child_processes, hangups_blocked, interrupts_deferred, set_handlers_again

ANSWER_S = 10.0
"""Time limit for opening a connection to a cluster, in seconds."""
LOOPBACK = "127.0.0.1"
AUTH_MODE = "RAY_AUTH_MODE"

logger = logging.getLogger(__name__)


@contextmanager
def ray_session(show: bool = False) -> Iterator[None]:
    """Connect to Ray, and always disconnect on exit, which stops a local cluster.

    Args:
        show: whether to write Ray's own messages and the output of actors to stdout and stderr.

    Raises:
        ClusterError: the cluster in ``RAY_ADDRESS`` does not answer, rejects the token, or has another version of Ray or Python.
        InfrastructureError: no local cluster could be started.
    """
    if not os.isatty(1):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # By default, Ray writes colour codes even into files and pipes.
    from trial_ray import ray_internals

    logs: dict[str, Any] = {"log_to_driver": show, "logging_level": logging.INFO if show else logging.ERROR}
    with ExitStack() as stack:
        stack.callback(_shut_down)
        with interrupts_deferred(), ray_internals.without_termination_handler():
            if address := os.environ.get("RAY_ADDRESS"):
                _join(address, logs)
            else:
                stack.enter_context(patch.dict(os.environ, _loopback()))
                stack.enter_context(ray_internals.local_start())
                _start(logs)
            set_handlers_again()
        yield


def _shut_down() -> None:
    import ray

    try:
        with interrupts_deferred():
            ray.shutdown()
    finally:
        if isinstance(sys.exception(), KeyboardInterrupt):
            end_child_processes()  # An interrupted start or shutdown of Ray leaves processes behind.


def _join(address: str, logs: dict[str, Any]) -> None:
    import ray

    require_cluster(address)
    try:
        ray.init(**logs)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"Ray cannot use RAY_ADDRESS={address}: {error}") from error
    if os.environ.get(AUTH_MODE, "").lower() != "token":
        logger.warning(
            "the Ray cluster at %s is used without a token: any process that reaches its ports can run code on it. "
            "Start it with %s=token, and set that here, too (docs/reliability.md#security)",
            address,
            AUTH_MODE,
        )


def _loopback() -> dict[str, str]:
    """Return environment variables that make Ray and connections between actors use the loopback address."""
    sockets = (
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if "lo" in dict(socket.if_nameindex()).values() else {}
    )
    # Despite its name, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER also has an effect on Linux: unless it is 0, other machines can reach a
    # local Ray cluster.
    return {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "VLLM_HOST_IP": LOOPBACK, **sockets}


def _start(logs: dict[str, Any]) -> None:
    import ray

    try:
        # The address "local" makes Ray start a new cluster even if another one runs on this machine.
        with hangups_blocked():
            ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **logs)
    except Exception as error:
        raise InfrastructureError(
            f"Ray did not start on this machine: {first_line(error)}. `trial-ray doctor` checks what it needs."
        ) from error
    # Ray creates the token file of local clusters with read access for every user of this machine.
    with contextlib.suppress(OSError, RuntimeError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)


def require_cluster(address: str) -> None:
    """Check that a Ray head answers at ``HOST:PORT`` and accepts this process's token; Ray itself would try for two minutes.

    Other kinds of addresses (``auto``, ``local``, ``ray://...``) are not checked here.

    Raises:
        ClusterError: the check failed; the message contains the cause and the setting to change.
    """
    from ray.exceptions import AuthenticationError, RpcError

    from trial_ray.ray_internals import connect_to_head

    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    advice = "Start the cluster, correct the address, or unset RAY_ADDRESS to run only on this machine."
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(f"No Ray cluster answers at RAY_ADDRESS={address} ({error}). {advice}") from error
    try:
        connect_to_head(address)
    except AuthenticationError as error:
        raise ClusterError(
            f"The Ray cluster at RAY_ADDRESS={address} rejects the token of this process. Set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN to the cluster's token (`ray get-auth-token` on the head shows it)."
        ) from error
    except RpcError as error:
        raise ClusterError(
            f"The program at RAY_ADDRESS={address} is not a Ray head node ({error}). {advice}"
        ) from error

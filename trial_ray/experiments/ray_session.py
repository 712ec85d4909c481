"""The Ray cluster of one command: the one that ``RAY_ADDRESS`` names, else a local one that ends with the command."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trial_ray.errors import ClusterError

ANSWER_S = 10.0
"""How long a cluster may take to answer."""
# What an HTTP/2 client says first, with empty settings; a server, as that of every gRPC service, answers with its own.
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
HTTP2_SETTINGS = 4


@contextmanager
def ray_session(verbose: bool = False) -> Iterator[None]:
    """Connect to Ray, and disconnect (stopping a local cluster) on the way out, whatever happened.

    Args:
        verbose: show Ray's own messages and the output of actors.

    Raises:
        ClusterError: the cluster that ``RAY_ADDRESS`` names does not answer, refuses the token, or has other versions.
    """
    import ray

    level = logging.INFO if verbose else logging.ERROR
    address = os.environ.get("RAY_ADDRESS")
    if address:
        require_cluster(address)
    # "local" keeps a cluster that somebody else runs on this machine out of it.
    own: dict[str, Any] = {} if address else {"address": "local", "include_dashboard": False}
    try:
        ray.init(log_to_driver=verbose, logging_level=level, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if not address:
            raise
        raise ClusterError(f"Ray cannot use RAY_ADDRESS={address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def require_cluster(address: str) -> None:
    """Check that a Ray head answers at ``HOST:PORT`` and takes this process's token; Ray itself would try for two minutes.

    Other kinds of addresses (``auto``, ``local``, ``ray://...``) are left to Ray.

    Raises:
        ClusterError: says what is wrong, and what to set.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled; what ray.init itself connects with
    from ray.exceptions import AuthenticationError, RpcError

    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    mend = "Start the cluster, correct the address, or unset RAY_ADDRESS to run on this machine alone."
    try:
        speaks = _speaks_http2(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        raise ClusterError(f"No Ray cluster answers at RAY_ADDRESS={address} ({error}). {mend}") from error
    if not speaks:
        raise ClusterError(
            f"What answers at RAY_ADDRESS={address} is no Ray head: the port is another program's. {mend}"
        )
    try:
        GcsClient(address=address)
    except AuthenticationError as error:
        raise ClusterError(
            f"The Ray cluster at RAY_ADDRESS={address} refuses the token of this process. Set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN to the cluster's token (`ray get-auth-token` on the head shows it)."
        ) from error
    except RpcError as error:
        raise ClusterError(f"What answers at RAY_ADDRESS={address} is no Ray head ({error}). {mend}") from error


def _speaks_http2(host: str, port: int) -> bool:
    """Whether a server answers that may be Ray's; with TLS, which hides that, whether any does."""
    with socket.create_connection((host, port), timeout=ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("1", "true"):
            return True
        connection.sendall(HTTP2_GREETING)
        answer = connection.recv(9)
    return len(answer) > 3 and answer[3] == HTTP2_SETTINGS

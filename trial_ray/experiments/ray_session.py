"""The Ray cluster of one command: the one that ``RAY_ADDRESS`` names, else a local one that ends with the command."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trial_ray.errors import ConfigError, InfrastructureError

ATTEMPTS = 3
"""Starts of a local Ray, which gives itself 30 s: on a busy machine the first may take longer."""
CONNECT_S = 5.0

logger = logging.getLogger(__name__)


@contextmanager
def ray_session(show: bool = False) -> Iterator[None]:
    """Connect to Ray, and disconnect (stopping a local cluster) on the way out, whatever happened.

    Args:
        show: write Ray's own messages and the output of actors to stdout and stderr.

    Raises:
        ConfigError: the cluster that ``RAY_ADDRESS`` names took no connection.
        InfrastructureError: no local cluster could be started.
    """
    import ray

    if not os.isatty(1):
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # else Ray colours the names of actors in files too
    try:
        _connect(log_to_driver=show, logging_level=logging.INFO if show else logging.ERROR)
        yield
    finally:
        ray.shutdown()


def _connect(**logs: Any) -> None:
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if address and (silence := unreachable(address)):
        raise _no_connection(address, silence)
    # "local" keeps a cluster that somebody else runs on this machine out of it.
    own: dict[str, Any] = {} if address else {"address": "local", "include_dashboard": False}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(**logs, **own)
            return
        except Exception as error:
            ray.shutdown()
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            if address:
                raise _no_connection(address, reason) from error
            if attempt == ATTEMPTS or "timed out" not in reason:
                raise InfrastructureError(
                    f"Ray did not start on this machine: {reason}. `trial-ray doctor` checks what it needs."
                ) from error
            logger.warning("Ray did not start within its 30 s; attempt %d of %d follows", attempt + 1, ATTEMPTS)


def _no_connection(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"RAY_ADDRESS is {address}, and that Ray cluster took no connection: {reason}. Correct it or unset it."
    )


def unreachable(address: str) -> str:
    """Why nothing answers at a cluster's address; empty where something does, or where the address names no port.

    Ray itself goes on trying for minutes, and may end the process without an exception.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""

"""The Ray cluster of one command: the one that ``RAY_ADDRESS`` names, else a local one that ends with the command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trial_ray.errors import ConfigError, InfrastructureError


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
    try:
        # "local" keeps a cluster that somebody else runs on this machine out of it.
        ray.init(**logs, **({} if address else {"address": "local", "include_dashboard": False}))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if address:
            raise ConfigError(
                f"RAY_ADDRESS is {address}, and that Ray cluster took no connection: {reason}. Correct or unset RAY_ADDRESS."
            ) from error
        raise InfrastructureError(
            f"Ray did not start on this machine: {reason}. `trial-ray doctor` checks what it needs."
        ) from error

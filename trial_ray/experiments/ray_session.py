"""The Ray cluster of one command: the one that ``RAY_ADDRESS`` names, else a local one that ends with the command."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_session(verbose: bool = False) -> Iterator[None]:
    """Connect to Ray, and disconnect (stopping a local cluster) on the way out, whatever happened.

    Args:
        verbose: show Ray's own messages and the output of actors.
    """
    import ray

    level = logging.INFO if verbose else logging.ERROR
    address = os.environ.get("RAY_ADDRESS")
    # "local" keeps a cluster that somebody else runs on this machine out of it.
    own: dict[str, Any] = {} if address else {"address": "local", "include_dashboard": False}
    ray.init(log_to_driver=verbose, logging_level=level, **own)
    try:
        yield
    finally:
        ray.shutdown()

"""A Ray of the benchmark's own, with logical CPUs of its choice."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray

ATTEMPTS = 3


@contextmanager
def local_ray(num_cpus: int = 2) -> Iterator[None]:
    """Start Ray, again where a busy machine took longer than the 30 s for which Ray waits; stop it on the way out."""
    # Ray's sockets live under this folder, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                ray.init(
                    # Not a cluster that somebody else runs on this machine.
                    address="local",
                    num_cpus=num_cpus,
                    object_store_memory=400_000_000,
                    include_dashboard=False,
                    log_to_driver=False,
                    _temp_dir=folder,
                )
                break
            except Exception as error:
                ray.shutdown()
                if attempt == ATTEMPTS or "timed out" not in str(error):
                    raise
        try:
            yield
        finally:
            ray.shutdown()

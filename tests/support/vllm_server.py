"""vLLM's OpenAI-compatible server of a model, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ray_nodes import free_ports

START_S = 600


@contextlib.contextmanager
def served(python: Path | str, model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The base URL of a server of ``model``, which it calls ``tiny``; stopped on the way out.

    What ``vllm serve`` runs; that command itself reads a version that the wheel for CPUs has under another name.

    Args:
        python: of the environment that has vLLM.
        model: its folder.
        log: takes what the server prints.
        arguments: further ones of the server.
    """
    (port,) = free_ports(1)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", *arguments]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with log.open("w") as output:
        # In a session of its own, so that its engine's process ends with it.
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | settings, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while not _is_healthy(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(server.pid, number)
                server.wait(timeout=30)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False

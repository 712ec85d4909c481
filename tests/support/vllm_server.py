"""vLLM's OpenAI-compatible server of a model, in a process of its own."""

import contextlib
import os
import signal
import subprocess
import time
import urllib.request

from ray_nodes import free_ports

START_S = 600


@contextlib.contextmanager
def served(python, model, log, *arguments):
    """Serve a model under the name ``tiny`` inside the context; yield the server's base URL.

    The module is the one that ``vllm serve`` runs; that command does not find the version of the wheel for CPUs.

    Args:
        python: interpreter of the environment that has vLLM.
        model: folder of the model.
        log: file for the server's output.
        arguments: further arguments of the server.
    """
    (port,) = free_ports(1)
    words = (
        f"{python} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny --host 127.0.0.1 "
        f"--port {port} --dtype float32 --enforce-eager"
    ).split()
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with log.open("w") as output:
        # A new session lets the server's engine process be stopped with it.
        server = subprocess.Popen(
            [*words, *arguments], stdout=output, stderr=output, env=os.environ | settings, start_new_session=True
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


def _is_healthy(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False

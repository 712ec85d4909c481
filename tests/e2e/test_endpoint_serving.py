"""A checkpoint behind ``vllm serve`` solves the tasks that ``trial-ray evaluate`` solves with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from trial_ray.cli import main
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.models.packaged import alfworld_tiny

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
START_S, EVALUATION_S, STOP_S = 600, 600, 30
TASKS = ["--env", "trial/ALFWorld-v0", "--split", "generated", "--episodes", "24"]
SETTINGS = {
    "env_config.num_games": 24,
    "prompt_style": "plain",
    "history_window": 1,
    "max_prompt_tokens": 512,
    "max_response_tokens": 16,
    "evaluation_temperature": 0,
    "engine": "transformers",
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("served") / "vllm.log"
    pytest.importorskip("vllm")
    # What ``vllm serve`` runs; that command itself reads a version that the wheel for CPUs has under another name.
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(alfworld_tiny())]
    arguments += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--dtype", "float32", "--max-model-len", "544", "--max-num-seqs", "8", "--enforce-eager"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        # In a session of its own, so that its engine's process ends with it.
        server = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            end(server)


def wait_until_healthy(url, server, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    pytest.fail(f"vllm serve was not healthy after {START_S} s:\n{log.read_text()[-3000:]}")


def end(server):
    """End the server and its engine's process, however far they came."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait(STOP_S)


def test_greedy_episodes_are_those_of_the_checkpoint(endpoint, tmp_path):
    settings = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    served, own = tmp_path / "served.json", tmp_path / "own.json"
    assert main(["evaluate", "--endpoint", endpoint, "--model", "tiny", *TASKS, *settings, "--json", str(served)]) == 0
    # In a process of its own, whose Ray is not that of other tests.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [
        Path(sys.executable).with_name("trial-ray"),
        "evaluate",
        alfworld_tiny(),
        *TASKS,
        *settings,
        "--json",
        own,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=EVALUATION_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found, expected = EvaluationResult.load(served), EvaluationResult.load(own)
    assert found.protocol == expected.protocol
    assert 0 < expected.success_rate < 1, "or it is not tested"
    assert found.episodes == expected.episodes

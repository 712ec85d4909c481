"""vLLM's own log: the size of the cache stands in the run's log file, and not on the terminal."""

import os
import subprocess
import sys
import time

import pytest

from trial_ray.engines.arguments import LOG_LEVEL
from trial_ray.engines.pool import EnginePool
from trial_ray.errors import ConfigError

pytestmark = pytest.mark.vllm

SESSION = """
import sys
from pathlib import Path
from trial_ray.cli import console as terminal
from trial_ray.engines.pool import EnginePool
from trial_ray.runs.ray_session import ray_session
from trial_ray.runs.terminal import library_log

model, log = sys.argv[1], Path(sys.argv[2])
console = terminal.output()
with library_log(log, console), ray_session(show=True):
    pool = EnginePool.create(
        engine="vllm", model_path=model, num_engines=1, engine_kwargs={"max_model_len": 64, "kv_cache_gib": 0.1}
    )
    pool.start()
    console.print("started")
    sys.stdin.read()  # Ray brings the actor's output a moment later
"""
CACHE_SIZE = "KV cache size: "


@pytest.mark.long
def test_the_size_of_the_cache_is_in_the_log_file_and_not_on_the_terminal(tiny_qwen3, tmp_path):
    log = tmp_path / "logs" / "libraries.log"
    command = [sys.executable, "-c", SESSION, str(tiny_qwen3), str(log)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # Without a level of the environment's, which TRL sets in a process that imports it.
    environment = {name: value for name, value in os.environ.items() if name != LOG_LEVEL}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            deadline = time.monotonic() + 240
            while process.poll() is None and time.monotonic() < deadline:
                if log.exists() and CACHE_SIZE in log.read_text():
                    break
                time.sleep(0.2)
        finally:
            shown, _ = process.communicate("", timeout=60)
    assert CACHE_SIZE in log.read_text()
    assert shown == "started\n"


def test_a_level_that_no_logger_has_is_refused():
    with pytest.raises(ConfigError, match="log_level='LOUD' found, one of DEBUG, INFO, WARNING, ERROR expected"):
        EnginePool.create(
            engine="vllm", model_path="m", num_engines=1, engine_kwargs={"max_model_len": 64, "log_level": "LOUD"}
        )

"""``cluster/submit.sh`` against a local head with token authentication: one training iteration as a submitted job."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENT = "tuned_examples/alfworld_quickstart.py"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; held together until all are known, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


@pytest.fixture(scope="module")
def client() -> Iterator[dict[str, str]]:
    """Environment of a client of a local head that shares neither ports nor files with any other Ray here."""
    port, dashboard, agent, ray_client = free_ports(4)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    # Ray's sockets live under this folder, and their paths must stay short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        arguments = (
            f"--head --block --num-cpus=2 --object-store-memory=200000000 --disable-usage-stats --temp-dir={folder} "
            f"--port={port} --dashboard-host=127.0.0.1 --dashboard-port={dashboard} "
            f"--dashboard-agent-listen-port={agent} --ray-client-server-port={ray_client} "
            "--min-worker-port=0 --max-worker-port=0"
        )
        log = Path(folder) / "start.log"
        with log.open("w") as output:
            head = subprocess.Popen(
                ["ray", "start", *arguments.split()], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wait_for_job_agent(environment, head, log)
            yield environment
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(timeout=60)


def wait_for_job_agent(environment: dict[str, str], head: subprocess.Popen[bytes], log: Path) -> None:
    """The dashboard answers before the agent that starts jobs is up; until then it refuses them."""
    request = urllib.request.Request(
        environment["RAY_API_SERVER_ADDRESS"] + "/api/jobs/",
        data=json.dumps({"entrypoint": "true"}).encode(),
        headers={"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}", "Content-Type": "application/json"},
    )
    deadline, answer = time.monotonic() + 120, ""
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(request, timeout=60):
                return
        except (urllib.error.URLError, TimeoutError) as error:
            answer = str(error)
        time.sleep(1)
    pytest.fail(f"the local head takes no jobs: {answer}\n{log.read_text()}")


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "cluster" / "submit.sh", *arguments], env=environment, capture_output=True, text=True, timeout=400
    )


def test_a_submitted_job_trains_and_leaves_its_checkpoint(client, model_path, tmp_path):
    run = tmp_path / "run"
    settings = {
        "warm_start": None,
        "model_path": model_path,
        "engine": "transformers",
        "panel_split": None,
        "tasks_per_iteration": 2,
        "group_size": 2,
        "hindsight_start_iteration": 1,
    }
    overrides = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    done = submit(client, "--id", "one-iteration", EXPERIMENT, "--", "--iterations", "1", "--out", str(run), *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'one-iteration' succeeded" in done.stdout
    assert (run / "summary.json").is_file()
    checkpoints = list((run / "checkpoints").iterdir())
    assert list(checkpoints[0].rglob("model.safetensors")), checkpoints


def test_a_failed_run_fails_the_submission(client, tmp_path):
    done = submit(client, EXPERIMENT, "--", "--out", str(tmp_path / "run"), "--set", "no_such_setting=1")
    assert done.returncode != 0
    assert "no_such_setting" in done.stdout + done.stderr


def test_a_client_without_the_token_is_turned_away(client):
    done = submit({**client, "RAY_AUTH_TOKEN": secrets.token_hex(32)}, EXPERIMENT)
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()

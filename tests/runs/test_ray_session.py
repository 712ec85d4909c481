"""The Ray of a command: its start on this machine, signals meanwhile, and errors of unusable clusters."""

import os
import socket
import stat
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from commands import run_python
from ray._private import services
from ray.exceptions import AuthenticationError, RpcError

from trial_ray import ray_internals
from trial_ray.errors import ClusterError, InfrastructureError
from trial_ray.runs.ray_session import ray_session


@pytest.fixture
def init(monkeypatch):
    """Replace ``ray.init`` by a mock, and return it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.init", init := Mock())
    return init


STARTS = """
import os, signal, subprocess, ray
from ray._private import utils
from trial_ray.runs.ray_session import ray_session

happened = []

def init(**arguments):
    utils.set_sigterm_handler(lambda number, frame: happened.append("Ray's handler"))
    for _ in range(times):
        os.kill(os.getpid(), number)
    happened.append("started")

ray.init, ray.shutdown = init, lambda: happened.append("stopped")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process of a shell ignores SIGINT
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    for times in (1, 2):
        before = signal.getsignal(signal.SIGTERM)
        with subprocess.Popen(["sleep", "600"]) as child:
            try:
                with ray_session():
                    happened.append("used")
            except KeyboardInterrupt:
                happened.append("interrupted")
            killed = child.wait(60) == -signal.SIGKILL
        print(number.name, times, *happened, killed, signal.getsignal(signal.SIGTERM) is before)
        happened.clear()
"""


def test_the_first_signal_waits_for_the_end_of_the_start():
    """Use a process whose child processes may be killed. Ray's own handler would raise ``SystemExit`` during the start."""
    done = run_python(STARTS)
    assert done.returncode == 0, done.stderr
    waited = "started stopped interrupted True True"
    at_once = "stopped interrupted True True"
    assert done.stdout.splitlines() == [
        f"SIGTERM 1 {waited}",
        f"SIGTERM 2 {at_once}",
        f"SIGINT 1 {waited}",
        f"SIGINT 2 {at_once}",
        f"SIGHUP 1 {waited}",
        f"SIGHUP 2 {waited}",  # a closed terminal sends SIGHUP more than once
    ]


@pytest.mark.parametrize("busy_s", [45, 600])
def test_a_start_may_take_longer_than_rays_30_seconds(monkeypatch, busy_s):
    slept = []
    monkeypatch.setattr("trial_ray.ray_internals.time.monotonic", lambda: sum(slept))
    monkeypatch.setattr("trial_ray.ray_internals.time.sleep", slept.append)

    def get_node(*node):
        if sum(slept) < busy_s:
            raise RuntimeError("not yet")
        return node

    monkeypatch.setattr("ray._private.services.get_node", get_node)
    with ray_internals.local_start(), nullcontext() if busy_s == 45 else pytest.raises(RuntimeError, match="not yet"):
        assert services.get_node("head:1", "id") == ("head:1", "id")


def test_a_local_ray_is_reachable_only_from_this_machine(init, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "0")  # ray_session sets this for the whole process
    before = dict(os.environ)
    monkeypatch.setattr("ray._private.worker._global_node", None)  # another test may have started Ray
    with ray_session():
        assert init.call_args.kwargs["_node_ip_address"] == "127.0.0.1"
        assert not init.call_args.kwargs["include_dashboard"]
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
        assert services.get_node_ip_address() == "127.0.0.1"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert dict(os.environ) == before


@pytest.mark.parametrize("mode", [None, "disabled", "token"])
def test_a_cluster_without_a_token_causes_a_warning(init, monkeypatch, caplog, mode):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with ray_session():
        pass
    assert ("without a token" in caplog.text) == (mode != "token")


def test_a_ray_that_does_not_start_is_an_infrastructure_error(init):
    init.side_effect = Exception("no such file")
    with pytest.raises(InfrastructureError, match="no such file"), ray_session():
        pass


@pytest.mark.parametrize(
    ("address", "refusal", "expected"),
    [
        ("127.0.0.1:1", None, "No Ray cluster answers"),
        ("nonsense", None, "Invalid"),
        (None, AuthenticationError("wrong token"), "RAY_AUTH_TOKEN"),
        (None, RpcError("timed out"), "is not a Ray head node"),
    ],
)
def test_an_unusable_address_is_a_cluster_error(monkeypatch, address, refusal, expected):
    def connect(address):
        raise refusal

    monkeypatch.setattr("ray.shutdown", lambda: None)  # the Ray of other tests continues
    monkeypatch.setattr("trial_ray.ray_internals.connect_to_head", connect)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", address or f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ClusterError, match=expected), ray_session():
            pass

"""``trial/OpenEnv-v0`` without a server of OpenEnv: arguments, splits, and the limit of sessions."""

import functools
import http.server
import threading

import pytest

from trial_envs.errors import GeneratorSettingError, UnknownSplitError
from trial_envs.imports.openenv import OpenEnvEnv
from trial_ray.adapters.registry import find_adapter


def test_arguments_that_cannot_be_used_are_refused():
    for wrong in ({"url": "127.0.0.1:8000"}, {"num_tasks": 1_000_001}, {"timeout_s": float("inf")}):
        with pytest.raises(GeneratorSettingError):
            OpenEnvEnv(**wrong)
    with pytest.raises(UnknownSplitError):
        OpenEnvEnv(split="valid")


def test_splits_share_no_task():
    env = OpenEnvEnv(num_tasks=3)
    assert list(env.tasks()) == ["0", "1", "2"]
    assert list(env.tasks("test")) == ["1000000", "1000001", "1000002"]


@pytest.mark.parametrize(
    ("answer", "stated"), [(b'{"max_sessions": 5}', 5), (b"[]", None), (b"<html>", None), (b"", None)]
)
def test_the_servers_number_of_sessions_is_read(answer, stated, tmp_path):
    if answer:
        (tmp_path / "limits").write_bytes(answer)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for scheme in ("http", "ws"):
            assert OpenEnvEnv(f"{scheme}://127.0.0.1:{server.server_port}").max_instances == stated
        server.shutdown()
    assert OpenEnvEnv("http://127.0.0.1:9").max_instances is None


def test_it_is_played_in_a_separate_process():
    assert find_adapter("trial/OpenEnv-v0").own_process

"""``trial/OpenEnv-v0`` without a server of OpenEnv: arguments, splits, and the limit of sessions."""

import http.server
import threading

import gymnasium
import pytest

import trial_envs
from trial_envs.errors import GeneratorSettingError, UnknownSplitError
from trial_ray.adapters.registry import find_adapter

trial_envs.register()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"url": "127.0.0.1:8000"}, GeneratorSettingError),
        ({"num_tasks": 1_000_001}, GeneratorSettingError),
        ({"timeout_s": float("inf")}, GeneratorSettingError),
        ({"split": "valid"}, UnknownSplitError),
        ({"max_turns": 0}, GeneratorSettingError),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(settings, error):
    with pytest.raises(error):
        gymnasium.make("trial/OpenEnv-v0", **settings)


def test_splits_share_no_task():
    env = gymnasium.make("trial/OpenEnv-v0", num_tasks=3).unwrapped
    assert list(env.tasks()) == ["0", "1", "2"]
    assert list(env.tasks("test")) == ["1000000", "1000001", "1000002"]
    env.close()


@pytest.mark.parametrize(
    ("answer", "stated"), [(b'{"max_sessions": 5}', 5), (b"[]", None), (b"<html>", None), (b"", None)]
)
def test_the_servers_number_of_sessions_is_read(answer, stated):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if answer and self.path == "/limits" else 404)
            self.end_headers()
            self.wfile.write(answer)

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for scheme in ("http", "ws"):
            env = gymnasium.make("trial/OpenEnv-v0", url=f"{scheme}://127.0.0.1:{server.server_port}")
            assert env.unwrapped.max_instances == stated
        server.shutdown()
    assert gymnasium.make("trial/OpenEnv-v0", url="http://127.0.0.1:9").unwrapped.max_instances is None


def test_it_is_played_in_a_separate_process():
    assert find_adapter("trial/OpenEnv-v0").own_process

"""Runs on S3, with moto's server: trained, resumed and read there, while the server goes away and comes back."""

import re
from urllib.request import Request, urlopen

import pytest
from nano_model import save_nano_model

from trial_ray import cli
from trial_ray.files import CACHE_VARIABLE
from trial_ray.runs.storage import Storage, whole_checkpoints
from trial_ray.runs.stored_run import _StoredRun

EXPERIMENT = """
from tiny_run import games_config

config = (
    games_config({model!r}, max_turns=3, num_tasks=3, lr=1e-3, group_size=3)
    .training(hindsight_start_iteration=1, hindsight_coeff=1.0, clamp_alpha=10.0)
    .env_runners(max_response_tokens=8, seeded_sampling=True)
    .engines(engine_kwargs={{"max_model_len": 508}})
)
stop = {{"training_iteration": 2}}
"""


class Server:
    """moto's S3 server on this machine, which keeps its content while it is stopped."""

    def __init__(self):
        self.port = 0
        self.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self):
        self._server.stop()
        self._server._server.server_close()  # it still accepts connections

    def start(self):
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def uri(self):
        return f"s3://runs/first try?scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"


@pytest.fixture
def server(monkeypatch, tmp_path):
    pytest.importorskip("moto", exc_type=ImportError)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(CACHE_VARIABLE, f"{tmp_path}/cache")
    started = Server()
    urlopen(Request(f"http://127.0.0.1:{started.port}/runs", b"", method="PUT"), timeout=60).close()
    yield started
    started.stop()


def test_a_run_on_s3_is_trained_resumed_and_read(server, tmp_path, monkeypatch, capsys):
    file = tmp_path / "experiment.py"
    file.write_text(EXPERIMENT.format(model=str(save_nano_model(tmp_path / "nano"))))
    uri = server.uri()
    storage, after_checkpoint = Storage.open(uri), _StoredRun.after_checkpoint
    checkpoints = []

    def after(run):
        """Stop the server during the first checkpoint."""
        checkpoints.append(run)
        if len(checkpoints) == 1:
            server.stop()
        after_checkpoint(run)
        if len(checkpoints) == 1:
            server.start()

    monkeypatch.setattr(_StoredRun, "after_checkpoint", after)
    assert cli.main(["train", str(file), "--out", uri, "--checkpoint-every", "1"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"warning: {uri} cannot be written: " in out
    assert f"{uri} is up to date again" in out
    assert whole_checkpoints(storage.files()) == ["000001", "000002"]
    (local,) = tmp_path.glob("cache/storage/runs/s3-*/runs/first try")
    for path in (path for path in local.rglob("*") if path.is_file()):
        storage.fetch(path.relative_to(local).as_posix(), tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == path.read_bytes()
        assert not any(secret in path.read_bytes() for secret in SECRETS)

    monkeypatch.setenv(CACHE_VARIABLE, f"{tmp_path}/elsewhere")
    for arguments in (
        ["train", str(file), "--resume", uri, "--iterations", "3", "--trust"],
        ["report", uri],
        ["inspect", uri, "--text", "--iteration", "3"],
        ["replay", uri, "--iteration", "3", "--trust"],
        ["evaluate", uri, "--split", "generated", "--tasks", "2"],
        ["export", f"{uri.replace('?', '/checkpoints/000003?')}", f"{tmp_path}/agent"],
    ):
        assert cli.main(arguments) == 0, arguments
    assert "000003" in whole_checkpoints(storage.files())
    assert (tmp_path / "agent/model.safetensors").exists()


SECRETS = (b"AKIAIOSFODNN7EXAMPLE", b"wJalrXUtnFEMI")

"""Secrets are in no file that a run writes."""

from __future__ import annotations

import ast
import sys

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm

from trial_ray import cli
from trial_ray.algorithms import TRIALConfig
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import redacted

PLANTED = {
    "WANDB_API_KEY": "planted-wandb-0123456789",
    "HF_TOKEN": "hf_planted0123456789",
    "RAY_AUTH_TOKEN": "planted-ray-0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+0123456789",
}
IN_ADDRESS = "postgres://user:planted-pw@host/db"


@pytest.fixture
def planted(monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DATABASE_URL", IN_ADDRESS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--set env_config.api_key=abc lr=1", "--set env_config.api_key=<hidden> lr=1"),
        ("Client(token='a b', size=3)", "Client(token='<hidden>', size=3)"),
        ('{"hf_token": "x", "max_prompt_tokens": 3}', '{"hf_token": "<hidden>", "max_prompt_tokens": 3}'),
        ("https://me:pw@host/x https://host:80/@y", "https://<hidden>@host/x https://host:80/@y"),
        ("redis://:pw@host", "redis://<hidden>@host"),
        ("author: me, tokens=3, tokenizer=x", "author: me, tokens=3, tokenizer=x"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text, expected):
    assert redacted(text) == expected


def test_code_stays_code():
    code = "password = ask()\nkey = dict(api_key='abc', auth=os.environ['X'])\nurl = 'https://a:b@c'\n"
    found = redacted(code, code=True)
    ast.parse(found)
    assert "abc" not in found
    assert "a:b" not in found
    assert "ask()" in found
    assert "os.environ['X']" in found


def secrets_in(folder):
    planted = [*PLANTED.values(), "planted-pw", "planted-argument"]
    return [
        (file.name, value)
        for file in folder.rglob("*")
        if file.is_file()
        for value in planted
        if value.encode() in file.read_bytes()
    ]


def test_no_file_of_a_run_holds_a_secret(planted, monkeypatch, tmp_path):
    """Planted in the environment, the experiment file, the command line, the environment's arguments and an error."""
    error = RuntimeError(f"no access with {PLANTED['HF_TOKEN']} at {IN_ADDRESS}")
    monkeypatch.setattr("trial_ray.algorithms.config.GRPOConfig.build_algo", lambda self: FakeAlgorithm(3, error))
    monkeypatch.setattr("trial_ray.runs.ray_session._start", lambda logs: None)
    experiment = tmp_path / "experiment.py"
    further = f"config.env_config['data'] = '{IN_ADDRESS}'\nkey = '{PLANTED['WANDB_API_KEY']}'\n"
    experiment.write_text(EXPERIMENT + further + "login = dict(password='planted-argument')\n")
    line = ["train", str(experiment), "--out", str(tmp_path / "run"), "--set", "model_path=https://u:planted-pw@hub/m"]
    monkeypatch.setattr(sys, "argv", ["trial-ray", *line])
    assert cli.main(line) == 1
    assert {"run.json", "resolved_config.json", "experiment.py", "error.log"} <= {
        file.name for file in (tmp_path / "run").iterdir()
    }
    assert "<hidden>" in (tmp_path / "run" / "error.log").read_text()
    assert secrets_in(tmp_path / "run") == []


def test_evaluations_do_not_hold_a_secret(planted, tmp_path):
    config = TRIALConfig().environment(
        "trial/ALFWorld-v0", env_config={"split": "generated", "data": f"/x/{PLANTED['HF_TOKEN']}"}
    )
    [entry] = config.environment_entries()
    EvaluationResult(entry.describe(), []).save(tmp_path / "evaluation.json")
    assert secrets_in(tmp_path) == []

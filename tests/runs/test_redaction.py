"""Secrets are in no file that a run writes."""

from __future__ import annotations

import ast
import json
import sys

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm
from ray import cloudpickle
from riddle_env import RiddleEnv
from user_env import registered

from trial_ray import cli, secret
from trial_ray.algorithms import TRIALConfig
from trial_ray.errors import ConfigError, InfrastructureError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.files import redacted
from trial_ray.runs.config_record import from_record, to_record, with_command
from trial_ray.runs.experiment_copy import code_without_secrets
from trial_ray.runs.watchdog import record_restart

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
        ("--set env_config.api_key=${MY_KEY} {'token': '${MY_KEY}'}",) * 2,
        ("--set env_config.use_auth=True",) * 2,
        ("author: me, tokens=3, tokenizer=x", "author: me, tokens=3, tokenizer=x"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text, expected):
    assert redacted(text) == expected


def test_the_reason_of_a_restart_has_no_secret(planted, tmp_path):
    error = InfrastructureError(f"{PLANTED['HF_TOKEN']} was refused by {IN_ADDRESS}")
    written = record_restart(tmp_path, f"restarting: {error}", error).read_text()
    assert "was refused by" in written
    assert not [value for value in (*PLANTED.values(), "planted-pw") if value in written]


FORMS = [
    "api_key = 'PLANTED'",
    "api_key: str = 'PLANTED'",
    'api_key = """PLAN\nPLANTED"""',
    "api_key = (\n    'PLANTED'\n    'PLANTED'\n)",
    "api_key = f'{x}PLANTED'",
    "api_key = b'PLANTED'.decode()",
    "api_key = x or 'é' + 'PLANTED'",
    "api_key, other = 'PLANTED', 2",
    "config.env_config['api_key'] = Hidden('PLANTED')",
    "settings.api_key = {'value': ['PLANTED']}",
    "call(1, api_key='PLANTED')",
    "call({'é': 'é', 'api_key': 'PLANTED'})",
    "def f(a, api_key='PLANTED', *, token=r'PLANTED'): pass",
    "(api_key := 'PLANTED')",
    "environ.setdefault('HF_TOKEN', 'PLANTED')",
    "api_key = environ.get('API_KEY', 'PLANTED')",
    "url = 'https://a:PLANTED@c'",
]


@pytest.mark.parametrize("code", FORMS)
def test_code_stays_code_without_what_it_gives_to_secrets(code):
    found = code_without_secrets(f"before = 'kept'\n{code}\nafter = 'kept'\n")
    ast.parse(found)
    assert "PLANTED" not in found
    assert found.count("kept") == 2


def test_code_that_only_names_secrets_is_copied_as_it_is():
    code = (
        "password = ask()\nauth = os.environ['X']\ntoken = getenv('Y') or x[\"a\"]\nkey = dict(api_key=secret('Z'))\n"
    )
    code += "config.env_config['api_key'] = '${Z}'\n"
    assert code_without_secrets(code) == code


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
    monkeypatch.setattr("trial_ray.algorithms.grpo.GRPOConfig.build_algo", lambda self: FakeAlgorithm(3, error))
    monkeypatch.setattr("trial_ray.runs.ray_session._start", lambda logs: None)
    monkeypatch.setattr("trial_ray.algorithms.startup.require_inputs", lambda config: None)
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


class KeyedEnv(RiddleEnv):
    def __init__(self, api_key: str, keys: tuple = ()) -> None:
        super().__init__()
        self.keys = (api_key, *keys)


def test_a_secret_is_read_where_the_environment_is_made_and_written_nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_LOGIN", "planted-argument")
    with registered(KeyedEnv):
        keys = {"api_key": secret("JUDGE_LOGIN"), "keys": ["${JUDGE_LOGIN}", "$JUDGE_LOGIN", "other"]}
        config = TRIALConfig().environment(KeyedEnv.ENV_ID, env_config=keys).rl_module(model_path="m")
        config.validate()
        (entry,) = config.environment_entries()
        assert entry.make().unwrapped.keys == ("planted-argument", "planted-argument", "$JUDGE_LOGIN", "other")
        record = json.loads(json.dumps(with_command(None, to_record(config), again=False)))
        assert from_record(record).environment_entries()[0].config == keys
        assert b"planted-argument" not in cloudpickle.dumps(config) + json.dumps(record).encode()
        assert redacted("the server refused planted-argument") == "the server refused <hidden>"
        # The folder of somebody else asks for no variable of this user's.
        theirs = from_record({**record, "signature": ""})
        assert theirs.env_config == {}
        monkeypatch.delenv("JUDGE_LOGIN")
        with pytest.raises(ConfigError, match="api_key is the environment variable JUDGE_LOGIN, which is not set on"):
            entry.make()


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("environment", {"env": "x", "env_config": {"api_key": "planted-argument"}}),
        ("environment", {"env": "x", "env_config": {"server": {"hf-token": [12345678]}}}),
        ("environment", {"environments": [("x", {"auth": {"user": "planted-argument"}}, 1.0)]}),
        ("evaluation", {"evaluation_env_config": {"password": "planted-argument"}}),
        ("rl_module", {"warm_start": {"env_config": {"api_key": {"grid_search": ["planted-argument"]}}}}),
    ],
)
def test_a_plain_value_under_the_name_of_a_secret_is_refused_before_anything_writes_it(section, settings):
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="m")
    getattr(config, section)(**settings)
    for use in (config.validate, config.to_dict):  # Tune takes the dict
        with pytest.raises(ConfigError, match="looks like a secret") as error:
            use()
        assert "planted" not in str(error.value)


def test_a_short_value_that_a_reference_names_is_hidden(monkeypatch):
    monkeypatch.setenv("JUDGE_LOGIN", "hunter2")
    secret("JUDGE_LOGIN")
    assert redacted("refused: hunter2") == "refused: <hidden>"


def test_words_that_hold_no_secret_are_taken():
    settings = {"token": None, "auth": True, "api_key": "<hidden>", "max_tokens": 3, "password": "${JUDGE_LOGIN}"}
    TRIALConfig().environment("trial/ALFWorld-v0", env_config=settings).check_secrets()
    with pytest.raises(ConfigError, match="not given the name") as error:
        secret("hunter2!")
    assert "hunter2" not in str(error.value)

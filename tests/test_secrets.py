"""No file that a run writes contains the value of a secret."""

import json

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm, failing
from ray import cloudpickle
from riddle_env import RiddleEnv
from small_learners import config_of
from user_env import registered

from trial_ray import TRIALConfig, cli, secret
from trial_ray.errors import ConfigError, InfrastructureError
from trial_ray.runs.config_record import from_record, to_record, with_command
from trial_ray.secrets import contains_secret, redacted

PLANTED = ("planted-wandb-0123456789", "hf_planted0123456789", "planted-pw", "planted-argument")
VARIABLES = {"WANDB_API_KEY": PLANTED[0], "HF_TOKEN": PLANTED[1], "DATABASE_URL": "postgres://user:planted-pw@host/db"}


def test_secrets_in_texts_are_hidden():
    expected = {
        "--set env_config.api_key=abc lr=1": "--set env_config.api_key=<hidden> lr=1",
        "Client(token='a b', size=3)": "Client(token='<hidden>', size=3)",
        '{"hf_token": "x", "max_prompt_tokens": 3}': '{"hf_token": "<hidden>", "max_prompt_tokens": 3}',
        "https://me:pw@host/x https://host:80/@y": "https://<hidden>@host/x https://host:80/@y",
        "redis://:pw@host": "redis://<hidden>@host",
    }
    for harmless in (
        "--set env_config.api_key=${MY_KEY} {'token': '${MY_KEY}'}",
        "--set env_config.use_auth=True",
        "author: me, tokens=3, tokenizer=x, monkey=y",
    ):
        expected[harmless] = harmless
    assert {text: redacted(text) for text in expected} == expected


def test_literal_secrets_in_code_are_found():
    expected = {
        "api_key = 'x'": True,
        'judge_key: str = """x"""': True,
        "os.environ['HF_TOKEN'] = (\n    f'x'\n)": True,
        "call({'password': b'x'})": True,
        "url = 'https://a:x@c'": True,
        "password = ask()\nauth = os.environ['X']\ntoken = ''\napi_key=secret('Z')\nkeys = ['x']": False,
        "config.env_config['api_key'] = '${Z}'": False,
    }
    assert {code: contains_secret(f"before = 'x'\n{code}\nafter = 'x'\n") for code in expected} == expected


@pytest.mark.parametrize("literal", ["", "login = dict(password='planted-argument')\n"])
def test_no_file_of_a_run_contains_a_secret(monkeypatch, tmp_path, literal):
    """Plant secrets in variables, the experiment file, the command line, the environment's arguments and an error."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    error = InfrastructureError("no access with {HF_TOKEN} at {DATABASE_URL}".format(**VARIABLES))
    monkeypatch.setattr("trial_ray.algorithms.grpo.GRPOConfig.build_algo", lambda self: FakeAlgorithm(failing(error)))
    monkeypatch.setattr("trial_ray.runs.ray_session._start", lambda logs: None)
    monkeypatch.setattr("trial_ray.algorithms.startup.require_inputs", lambda config: None)
    experiment, run = tmp_path / "experiment.py", tmp_path / "run"
    experiment.write_text(f"{EXPERIMENT}import os\nconfig.env_config['data'] = os.environ['DATABASE_URL']\n{literal}")
    line = f"train {experiment} --out {run} --set model_path=https://u:planted-pw@hub/m".split()
    monkeypatch.setattr("sys.argv", ["trial-ray", *line])
    assert cli.main(line) == 1
    assert "<hidden>" in (run / "error.log").read_text()
    assert list(run.glob("logs/restart-*.log"))
    assert (run / "experiment.py").exists() == (not literal)
    files = [file for file in run.rglob("*") if file.is_file()]
    assert [(file, value) for file in files for value in PLANTED if value.encode() in file.read_bytes()] == []


class KeyedEnv(RiddleEnv):
    def __init__(self, api_key, keys=()):
        super().__init__()
        self.keys = (api_key, *keys)


def test_a_reference_becomes_its_value_only_in_the_environment(monkeypatch):
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
        # The record of another user must not read variables of this user.
        assert from_record({**record, "signature": ""}).env_config == {}
        monkeypatch.delenv("JUDGE_LOGIN")
        with pytest.raises(ConfigError, match="JUDGE_LOGIN"):
            entry.make()


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("environment", {"env": "x", "env_config": {"server": {"hf-token": [12345678]}}}),
        ("environment", {"environments": [("x", {"auth": {"user": "planted-argument"}}, 1.0)]}),
        ("evaluation", {"evaluation_env_config": {"password": "planted-argument"}}),
        ("rl_module", {"warm_start": {"env_config": {"api_key": {"grid_search": ["planted-argument"]}}}}),
    ],
)
def test_a_plain_secret_in_a_setting_is_refused(section, settings):
    config = config_of("trial", "m")
    getattr(config, section)(**settings)
    for use in (config.validate, config.to_dict):  # Tune writes the dict into files
        with pytest.raises(ConfigError, match="looks like a secret") as error:
            use()
        assert "planted" not in str(error.value)


def test_values_that_are_no_secrets_are_accepted():
    settings = {"token": None, "auth": True, "api_key": "<hidden>", "max_tokens": 3, "password": "${JUDGE_LOGIN}"}
    TRIALConfig().environment("trial/ALFWorld-v0", env_config=settings).check_secrets()


def test_a_reference_names_a_variable_whose_short_value_is_hidden(monkeypatch):
    monkeypatch.setenv("JUDGE_LOGIN", "hunter2")
    secret("JUDGE_LOGIN")
    assert redacted("refused: hunter2") == "refused: <hidden>"
    with pytest.raises(ConfigError) as error:
        secret("hunter2!")
    assert "hunter2" not in str(error.value)

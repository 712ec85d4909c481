"""Adapters in files of the user's, and modules beside an experiment file: errors name the file, classes reach actors."""

import sys
from types import SimpleNamespace

import gymnasium
import pytest
import ray
from ray import cloudpickle

from trial_ray.adapters.registry import load_adapters
from trial_ray.adapters.templates import PromptContext
from trial_ray.errors import ConfigError, InfrastructureError, UserInputError
from trial_ray.rllib_internals import RestartableGroup
from trial_ray.rollout.runner_group import TextEnvRunnerGroup
from trial_ray.runs.experiment import load_experiment

ADAPTER = """
from trial_ray.adapters import EnvironmentAdapter
ADAPTER = EnvironmentAdapter("mine/Words-v0", {fields})
"""
WORDS = """
import gymnasium
from dataclasses import dataclass
from trial_envs.core.projection import project_action

REQUEST = "say"


class WordsEnv(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return greeting(), {"task": "say it"}


def greeting():
    return "hello"


@dataclass(frozen=True)
class Asking:
    style = "plain"

    def render(self, context):
        return f"{context.task}: {REQUEST}"

    def project(self, response):
        return project_action(response, self.style)
"""
EXPERIMENT = """
import gymnasium
from {module} import Asking, WordsEnv
from trial_ray.algorithms import GRPOConfig
from trial_ray.adapters import EnvironmentAdapter

gymnasium.register("mine/Words-v0", entry_point="{module}:WordsEnv")
config = GRPOConfig().environment(
    "mine/Words-v0", adapter=EnvironmentAdapter("mine/Words-v0", templates={{"plain": Asking()}})
).rl_module(model_path="some/model").env_runners(prompt_style="plain")
"""


@pytest.fixture(autouse=True)
def clean():
    yield
    gymnasium.registry.pop("mine/Words-v0", None)
    for name, module in [*sys.modules.items()]:
        if name.startswith(("trial_ray_user_file_", "beside_an_experiment")):
            del sys.modules[name]
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(module)


def test_an_adapter_file_defines_an_adapter_and_runs_once(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ADAPTER.format(fields="task='count'"))
    (first,), (second,) = load_adapters([file]), load_adapters([file])
    assert first is second
    assert first.env_id == "mine/Words-v0"
    assert first.task == "count"
    assert load_adapters([]) == ()


@pytest.mark.parametrize(
    ("name", "text", "error", "told"),
    [
        ("mine.py", None, ConfigError, r"no file .*mine\.py; give the path of a Python file that defines ADAPTER"),
        ("mine.py", "ADAPTER = 'mine'", ConfigError, r"mine\.py must define ADAPTER.*got 'mine'"),
        ("mine.py", ADAPTER.format(fields="max_turns=0"), ConfigError, "adapter of mine/Words-v0 has max_turns = 0"),
        ("mine.py", "x = 1\nADAPTER = unknown", UserInputError, r"mine\.py, line 2: NameError"),
        ("mine.py", "x = (", UserInputError, r"mine\.py, line 1: SyntaxError"),
        ("run.json", "{}", ConfigError, r"run\.json is not a Python file"),
    ],
)
def test_a_file_without_a_usable_adapter_is_refused(name, text, error, told, tmp_path):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    for _ in range(2):  # nothing of the file is kept
        with pytest.raises(error, match=told):
            load_adapters([file])


@pytest.mark.actors
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("place", "module", "first"),
    [
        (".", "beside_an_experiment", ""),
        ("beside_an_experiment", "beside_an_experiment.words", ""),
        ("lib", "beside_an_experiment", "import sys\nsys.path.insert(0, {folder!r})\n"),
    ],
)
def test_a_module_that_actors_cannot_import_reaches_them(place, module, first, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file, beside = tmp_path / "experiment.py", tmp_path / place / f"{module.rpartition('.')[2]}.py"
    file.write_text(first.format(folder=str(beside.parent)) + EXPERIMENT.format(module=module))
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(WORDS)
    config = load_experiment(file).config
    assert str(tmp_path) not in sys.path
    config.validate()
    file.unlink()
    beside.unlink()

    @ray.remote(num_cpus=0.25)
    def look(config):
        (entry,) = config.environment_entries()
        observation, info = entry.make().reset(seed=0)
        context = PromptContext(info["task"], observation, (), (), 1)
        return observation, entry.adapter.template("plain").render(context)

    assert ray.get(look.remote(config), timeout=120) == ("hello", "say it: say")


@pytest.mark.actors
@pytest.mark.usefixtures("ray_session")
def test_an_env_runner_that_cannot_start_gives_its_reason(monkeypatch):
    @ray.remote(num_cpus=0.1)
    class Runner:
        def __init__(self):
            raise ImportError("No module named 'mine'")

        def ping(self): ...

    group = TextEnvRunnerGroup.__new__(TextEnvRunnerGroup)
    group._worker_manager = SimpleNamespace(actors=lambda: {1: Runner.remote()})
    # RLlib's answer if no env runner has any.
    monkeypatch.setattr(RestartableGroup, "get_spaces", lambda self: [][0])
    with pytest.raises(InfrastructureError, match=r"could start: ImportError: No module named 'mine'$"):
        group.get_spaces()

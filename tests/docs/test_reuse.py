"""The page about reuse: every block runs, RLlib trains, and TRL accepts the environment factory."""

import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest
from snippets import snippets

from trial_envs.errors import UnknownTaskError
from trial_envs.tool_env import ToolEnv

SETTINGS = {"split": "generated", "difficulty": "tiny", "max_turns": 3}


@pytest.mark.parametrize(
    ("number", "printed"),
    enumerate([" won 1.0\n", "done 1.0 {'r_type': 1.0", "async ", "True 1.0 [None, '<think>", "Actions: "]),
)
def test_a_block_runs_as_it_stands(number, printed, capsys):
    code = snippets("environments.md")
    assert len(code) == 5
    exec(compile(code[number], f"docs/environments.md, block {number}", "exec"), {"__name__": "__main__"})
    assert printed in capsys.readouterr().out


def test_a_tool_env_plays_episodes_one_after_the_other():
    env = ToolEnv("trial/ALFWorld-v0", **SETTINGS | {"max_turns": 50})
    assert env.act("look") == "The episode is over."
    for _ in range(2):
        first = env.reset(task=0, prompt=[{"role": "user", "content": ""}])
        assert "Your task is to: " in first
        assert ", help, inventory, look" in first.split("Actions: ")[1]
        assert env.get_reward() == 0.0
        for command in env._env.unwrapped.walkthrough:
            answer = env.act(command)
        assert answer.endswith("The episode is over.")
        assert env.get_reward() == 1.0
        assert env.act("look") == "The episode is over."
    env.reset(task=0)
    with pytest.raises(UnknownTaskError):
        env.reset(task=-1)
    assert (env.act("look"), env.get_reward()) == ("The episode is over.", 0.0)
    with pytest.raises(TypeError, match="expected a TextEnv"):
        ToolEnv("CartPole-v1")


def test_trl_finds_one_tool_a_reset_and_a_reward():
    found = find_spec("trl")
    if found is None:
        pytest.skip("TRL is not installed")
    trainer = (Path(found.origin).parent / "trainer" / "grpo_trainer.py").read_text()  # its import takes half a minute
    assert "environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None" in trainer
    from transformers.utils import get_json_schema

    env = ToolEnv("trial/ALFWorld-v0", **SETTINGS)
    members = dict(inspect.getmembers(type(env), predicate=inspect.isfunction))  # as the trainer lists them
    assert {name for name in members if not name.startswith("_")} == {"act", "reset", "get_reward"}
    schema = get_json_schema(env.act)["function"]
    assert schema["name"] == "act"
    assert schema["parameters"]["required"] == ["action"]
    assert schema["parameters"]["properties"]["action"]["type"] == "string"
    columns = {"prompt": [{"role": "user", "content": ""}], "task": 1}
    assert isinstance(env.reset(**columns), str)
    assert isinstance(env.act("x"), str)
    assert isinstance(env.get_reward(), float)


@pytest.mark.actors
def test_the_stock_configuration_trains(ray_session, capsys):
    (code,) = snippets("environments.md", "rllib")
    scope = {"__name__": "__main__"}
    exec(compile(code, "docs/environments.md, RLlib", "exec"), scope)
    assert scope["result"]["env_runners"]["num_env_steps_sampled"] >= 64
    assert scope["result"]["learners"]["default_policy"]["num_module_steps_trained"] > 0

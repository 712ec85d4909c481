"""The page about reuse: every block runs, RLlib trains, and TRL accepts the environment factory."""

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
        assert "Your task is to: " in env.reset(task=0, prompt=[{"role": "user", "content": ""}])
        for command in env._env.unwrapped.walkthrough:
            answer = env.act(command)
        assert answer.endswith("The episode is over.")
        assert env.get_reward() == 1.0
    with pytest.raises(UnknownTaskError):
        env.reset(task=-1)
    assert (env.act("look"), env.get_reward()) == ("The episode is over.", 0.0)
    with pytest.raises(TypeError, match="expected a TextEnv"):
        ToolEnv("CartPole-v1")


@pytest.mark.actors
def test_the_stock_configuration_trains(ray_session):
    (code,) = snippets("environments.md", "rllib")
    scope = {"__name__": "__main__"}
    exec(compile(code, "docs/environments.md, RLlib", "exec"), scope)
    assert scope["result"]["env_runners"]["num_env_steps_sampled"] >= 64
    assert scope["result"]["learners"]["default_policy"]["num_module_steps_trained"] > 0

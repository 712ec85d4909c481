"""Blocks of docs/environments.md run, and tool environments for TRL play episodes."""

import pytest
from snippets import snippets

from trial_envs.errors import UnknownTaskError
from trial_envs.tool_env import ToolEnv

SETTINGS = {"split": "generated", "difficulty": "tiny", "max_turns": 3}


@pytest.mark.parametrize(
    ("number", "printed"),
    enumerate([" won 1.0\n", "True 1.0 [None, '<think>", "Actions: "]),
)
def test_block_runs(number, printed, capsys):
    code = snippets("environments.md")
    assert len(code) == 3
    exec(compile(code[number], f"docs/environments.md, block {number}", "exec"), {"__name__": "__main__"})
    assert printed in capsys.readouterr().out


def test_tool_env_plays_episodes_in_sequence():
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
    with pytest.raises(TypeError):
        ToolEnv("CartPole-v1")

"""Blocks of docs/environments.md run, and tool environments for TRL play episodes."""

import pytest
from snippets import snippets

from trial_envs.errors import UnknownTaskError
from trial_envs.tool_env import ToolEnv


@pytest.mark.parametrize(("number", "printed"), enumerate([" won 1.0\n", "True 1.0 [None, '<think>", "Actions: "]))
def test_block_runs(number, printed, capsys):
    code = snippets("environments.md")
    assert len(code) == 3
    exec(compile(code[number], f"docs/environments.md, block {number}", "exec"), {"__name__": "__main__"})
    assert printed in capsys.readouterr().out


def test_tool_env_refuses_what_it_cannot_play():
    env = ToolEnv("trial/ALFWorld-v0", split="generated", difficulty="tiny")
    with pytest.raises(UnknownTaskError):
        env.reset(task=-1)
    assert env.act("look") == "The episode is over."
    assert env.get_reward() == 0.0
    with pytest.raises(TypeError):
        ToolEnv("CartPole-v1")

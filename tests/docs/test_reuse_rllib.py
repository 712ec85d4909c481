"""The RLlib block of the page about reuse trains for an iteration."""

import pytest
from snippets import snippets


@pytest.mark.actors
def test_the_stock_configuration_trains(ray_session, capsys):
    (code,) = snippets("environments.md", "rllib")
    scope = {"__name__": "__main__"}
    exec(compile(code, "docs/environments.md, RLlib", "exec"), scope)
    assert scope["result"]["env_runners"]["num_env_steps_sampled"] >= 64
    assert scope["result"]["learners"]["default_policy"]["num_module_steps_trained"] > 0

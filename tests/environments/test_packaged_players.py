"""Players that come with the adapters of other libraries' environments."""

from __future__ import annotations

import pytest

from trial_ray.environments.adapter import SolutionReader, begin
from trial_ray.environments.external import GEM, REASONING_GYM, TEXTARENA, AnswerReader
from trial_ray.environments.registry import PACKAGED
from trial_ray.errors import ConfigError


@pytest.mark.parametrize("adapter", [GEM, REASONING_GYM, TEXTARENA], ids=lambda adapter: adapter.env_id)
def test_the_adapters_can_be_used(adapter):
    adapter.check()
    assert PACKAGED[adapter.env_id] is adapter
    response = "<think>It is Bob.</think><action>[Bob]</action>"
    for style in ("tagged", "conversation"):
        assert adapter.template(style).project(response).action == "[Bob]"


@pytest.mark.parametrize(("adapter", "guess"), [(TEXTARENA, "[10]"), (GEM, "\\boxed{10}")])
def test_number_games_are_searched(adapter, guess):
    player = adapter.warm_start.demonstrator()
    begin(player, "Guess the number between 1 and 20.", "", 0, lambda: pytest.fail("the solution was read"))
    assert player.act("", ()) == guess


def test_the_answer_is_read_anew_in_every_episode():
    player = AnswerReader()
    assert isinstance(player, SolutionReader)
    begin(player, "1 + 2 =", "", 0, lambda: ("3",))
    assert player.act("", ()) == "3"
    begin(player, "Write a poem.", "", 0, lambda: ())
    with pytest.raises(ConfigError, match="no answer of its own"):
        player.act("", ())

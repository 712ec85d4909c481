"""Arguments of tool calls are checked against the whole schema that the type hints give."""

import enum
import json
from typing import Any, Literal

import pytest

from trial_envs.core.projection import Projection
from trial_envs.tool_env import ToolEpisode
from trial_ray.errors import ConfigError
from trial_ray.prompts.tool_calls import ToolSet


def tools_of(hint):
    """Return the tools of an episode with one tool, whose argument has this type hint."""

    def use(self, value):
        """Use a value.

        Args:
            value: A value.
        """
        return self._take(json.dumps(value))

    use.__annotations__ = {"value": hint}
    return ToolSet(type("Tools", (ToolEpisode,), {"use": use}))


def read(hint, value):
    return tools_of(hint).project([{"name": "use", "arguments": {"value": value}}])


def test_arguments_are_checked_against_the_whole_schema():
    for hint, valid, invalid, mistake in (
        (Literal["celsius", "fahrenheit"], "celsius", "kelvin", 'value is \'kelvin\', expected {"enum": ["celsius"'),
        (Literal["celsius"] | None, None, "kelvin", "value is 'kelvin'"),
        (int | None, None, "1", "value is '1'"),
        (int, 3, 3.0, "value is 3.0"),
        (int, 3, True, "value is True"),
        (float, 3, True, "value is True"),
        (int | str, "a", 1.5, "value is 1.5"),
        (list[dict], [{"a": 1}], [{}, 2], 'value[1] is 2, expected {"type": "object"}'),
        (list[int] | str | None, None, [1, "b"], "value[1] is 'b'"),
        (dict[str, list[int]], {"a": [1]}, {"a": [None]}, "value.a[0] is None"),
        (tuple[int, str], [1, "a"], [1], "value is [1]"),
        (list[Any], [1, "a"], 2, "value is 2"),
    ):
        assert read(hint, valid) == Projection(json.dumps(valid), True)
        refused = read(hint, invalid)
        assert (refused.action, refused.valid) == ("", False)
        assert mistake in refused.answer


def test_the_description_of_a_mistake_is_short():
    answer = read(dict[str, Literal["a" * 1000]], {"b" * 1000: "c" * 1000}).answer
    assert len(answer) < 320


class Colour(enum.Enum):
    RED = "red"


def test_a_type_that_json_cannot_express_is_refused():
    with pytest.raises(ConfigError, match="Colour"):
        tools_of(list[Colour] | None)

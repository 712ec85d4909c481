"""The tables of ``envs/README.md`` list the arguments of the constructors."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from trial_envs import ENTRY_POINTS, NAMESPACE

README = (Path(__file__).parents[2] / "envs" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_the_documented_arguments_are_those_of_the_constructor(name):
    module, cls = ENTRY_POINTS[name].split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), cls).__init__).parameters
    section = README.split(f"\n## `{NAMESPACE}/{name}`\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", section, re.M)
    assert rows == [(each, repr(value.default).replace("'", '"')) for each, value in [*parameters.items()][1:]]

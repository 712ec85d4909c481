"""The tables of ``envs/README.md`` list the registered environments and the arguments of their constructors."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from trial_envs import ENTRY_POINTS, NAMESPACE

README = (Path(__file__).parents[2] / "envs" / "README.md").read_text(encoding="utf-8")


def documented_arguments(env_id: str) -> dict[str, object]:
    """Argument -> default, from the table in the section of an id."""
    section = README.split(f"\n## `{env_id}`\n", 1)[1].split("\n## ", 1)[0]
    table = section.split("| argument | default | meaning |\n| --- | --- | --- |\n", 1)[1].split("\n\n", 1)[0]
    lines = [re.fullmatch(r"\| `(\w+)` \| `(.+?)` \| .+ \|", line) for line in table.splitlines()]
    return {line[1]: ast.literal_eval(line[2]) for line in lines}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_the_documented_arguments_are_those_of_the_constructor(name):
    module, cls = ENTRY_POINTS[name].split(":")
    signature = inspect.signature(getattr(importlib.import_module(module), cls).__init__)
    arguments = {parameter.name: parameter.default for parameter in signature.parameters.values()}
    arguments.pop("self")
    found = documented_arguments(f"{NAMESPACE}/{name}")
    assert list(found.items()) == list(arguments.items())


def test_the_documented_ids_are_the_registered_ones():
    table = README.split("| id | games | extra |\n", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(.+?)` \|", table, re.M)) == {f"{NAMESPACE}/{name}" for name in ENTRY_POINTS}

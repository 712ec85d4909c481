"""Writes ``trial_ray/config/keywords.pyi``: every keyword of the configs' sections, for type checkers and editors.

    python docsite/keyword_stubs.py

A section makes its keywords from the settings that are declared, which no type checker follows. ``training`` takes those of
every method here; which of them a method has is checked when the code runs.
"""

from __future__ import annotations

import json
import textwrap
import typing
from dataclasses import Field
from typing import Any

from trial_ray.algorithms.methods import METHODS, config_class
from trial_ray.config.declare import NoneType, declaration, sections_of
from trial_ray.files import PACKAGE

FILE = PACKAGE / "config" / "keywords.pyi"
HEAD = '''# Written by docsite/keyword_stubs.py
from collections.abc import Callable
from typing import Any, Literal, Self

from ray.tune.search.sample import Domain

Search = Domain | dict[str, list[Any]]

class Sections:
    """The methods of a config that set its settings; each returns the config."""

    def resources(self, *, num_cpus_for_main_process: float | Search = ..., **further: Any) -> Self:
        """RLlib's group, which accepts fractions of a CPU, too."""
'''


def stubs() -> str:
    """Return the text of the file."""
    configs = [config_class(method) for method in METHODS]
    methods = [_method(section.name, configs) for section in sections_of(configs[0])]
    return HEAD + "\n" + "\n".join(methods)


def _method(name: str, configs: list[type]) -> str:
    """Return a config group with the keywords that it has in any of the configs."""
    keywords: dict[str, str] = {}
    texts: dict[str, str] = {}
    for config in configs:
        section = next(each for each in sections_of(config) if each.name == name)
        for keyword, field in section.keywords(config).items():
            keywords.setdefault(keyword, f"{_values(field) or _annotation(field.type)} | Search")
            texts.setdefault(keyword, f"{declaration(field).doc}.")
        for keyword in section.further(config):
            keywords.setdefault(keyword, "Any")
            texts.setdefault(keyword, "see RLlib.")
    parameters = "".join(f"        {keyword}: {kind} = ...,\n" for keyword, kind in keywords.items())
    lines = [textwrap.fill(f"{keyword}: {text}", 110, subsequent_indent="    ") for keyword, text in texts.items()]
    body = textwrap.indent("\n".join([section.doc, "", "Args:", textwrap.indent("\n".join(lines), "    ")]), " " * 8)
    return f'    def {name}(\n        self,\n        *,\n{parameters}    ) -> Self:\n        """{body.strip()}\n        """\n'


def _values(field: Field[Any]) -> str:
    """Return the known values of a setting as an annotation, or an empty text if any value of its type is valid."""
    known = list(declaration(field).bounds.get("one_of", ()))
    if not known:
        return ""
    known += [None] if NoneType in typing.get_args(field.type) and None not in known else []
    return f"Literal[{', '.join('None' if each is None else json.dumps(each) for each in known)}]"


def _annotation(kind: Any) -> str:
    """Return a type as the text of an annotation."""
    if typing.get_origin(kind) is typing.Union:
        return " | ".join(map(_annotation, typing.get_args(kind)))
    if isinstance(kind, type) and not getattr(kind, "__args__", None):
        return "None" if kind is NoneType else kind.__name__
    return (
        str(kind).replace("typing.", "").replace("collections.abc.", "").replace("NoneType", "None").replace("'", '"')
    )


if __name__ == "__main__":
    FILE.write_text(stubs(), encoding="utf-8")

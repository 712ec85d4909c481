"""The stubs that type checkers and editors read are those of the settings that are declared."""

from __future__ import annotations

import ast

from keyword_stubs import FILE, stubs

from trial_ray.algorithms.methods import METHODS, config_class
from trial_ray.config.declare import fields_of, sections_of


def test_stubs_are_up_to_date():
    assert FILE.read_text(encoding="utf-8") == stubs(), "run python docsite/keyword_stubs.py"


def test_every_setting_of_every_method_is_a_keyword():
    (sections,) = [node for node in ast.parse(stubs()).body if isinstance(node, ast.ClassDef)]
    keywords = {
        function.name: {argument.arg for argument in function.args.kwonlyargs}
        for function in sections.body
        if isinstance(function, ast.FunctionDef)
    }
    for config in map(config_class, METHODS):
        declared = {section.name: set(section.keywords(config)) for section in sections_of(config)}
        assert {name for name, own in declared.items() if not own <= keywords[name]} == set()
        assert len(fields_of(config)) == sum(map(len, declared.values()))

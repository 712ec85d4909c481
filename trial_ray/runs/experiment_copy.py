"""The run folder's copy of an experiment file: the user's code without strings that are assigned to names of secrets."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from trial_ray.files import HIDDEN, REFERENCE, SECRET, redacted

_LOOKUPS = frozenset({"get", "getenv", "secret", "getpass", "input"})
"""Functions with a first argument that names a secret and is not the secret itself."""


def copy_without_secrets(file: Path, target: Path) -> None:
    """Copy a Python file unchanged except for secrets."""
    code = file.read_bytes().decode("utf-8", "surrogateescape")
    target.write_bytes(code_without_secrets(code).encode("utf-8", "surrogateescape"))


def code_without_secrets(code: str) -> str:
    """Replace every string that Python code assigns or passes to the name of a secret, in any syntax."""
    try:
        tree = ast.parse(code)
    except ValueError:  # SyntaxError, and surrogates; no such file could be run
        return redacted(code, code=True)
    lines = code.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = {
        (starts[text.lineno - 1] + text.col_offset, starts[(text.end_lineno or 0) - 1] + (text.end_col_offset or 0))
        for node in ast.walk(tree)
        for name, value in _given(node)
        if SECRET.search(name)
        for text in _texts(value)
    }
    written = b"".join(lines)
    for start, end in sorted(found, reverse=True):
        written = written[:start] + f"'{HIDDEN}'".encode() + written[end:]
    return redacted(written.decode(), code=True)


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a node gives values to, with the values."""
    if isinstance(node, ast.Assign):
        yield from ((name, node.value) for target in node.targets for name in _names(target))
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield from ((name, node.value) for name in _names(node.target))
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value
    elif isinstance(node, ast.Dict):
        yield from (
            (key.value, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        defaults = [*zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)]
        defaults += [(each, value) for each, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value]
        yield from ((each.arg, value) for each, value in defaults)
    elif isinstance(node, ast.Call):  # os.environ.setdefault("HF_TOKEN", ...), setattr(settings, "api_key", ...)
        for number, each in enumerate(node.args):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield from ((each.value, value) for value in node.args[number + 1 :])


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Attribute):
        yield target.attr
    elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        yield str(target.slice.value)
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _names(each)


def _texts(value: ast.AST) -> Iterator[ast.expr]:
    """Yield the string nodes in a value, except strings that only name it: subscript keys and arguments of lookup functions."""
    if isinstance(value, ast.JoinedStr):
        yield value
    elif isinstance(value, ast.Constant):
        if isinstance(value.value, str | bytes) and not REFERENCE.fullmatch(str(value.value)):
            yield value
    elif isinstance(value, ast.Subscript):
        yield from _texts(value.value)
    elif isinstance(value, ast.Call):
        yield from _texts(value.func)
        looks_up = ast.unparse(value.func).rpartition(".")[2] in _LOOKUPS
        for each in [*value.args[looks_up:], *value.keywords]:
            yield from _texts(each)
    else:
        for each in ast.iter_child_nodes(value):
            yield from _texts(each)

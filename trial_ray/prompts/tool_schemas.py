"""JSON schemas of tools, and the check of a call's arguments against them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args, get_type_hints, is_typeddict

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_JSON_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Any)
_NULL: Mapping[str, Any] = {"type": "null", "enum": None, "anyOf": {"type": "null"}}
"""Entries that allow null, by JSON schema keyword; if the value of the keyword is a list, the entry is added to it."""


def tool_schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool in the format of ``apply_chat_template``.

    Args:
        name: name of the tool in error messages.
        tool: function or method with type hints and a docstring.

    Raises:
        ConfigError: an argument has no type hint or no description, or a type that JSON cannot express, such as an enumeration.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (TypeHintParsingException, DocstringParsingException) as error:
        raise ConfigError(
            f"The tool {name} has no schema: {error}. Give every argument a type hint and a line under Args: in its docstring."
        ) from error
    hints = {key: hint for key, hint in get_type_hints(tool).items() if key != "return"}
    # If JSON cannot express a class, transformers describes it as an "object" without fields or values.
    if unknown := [f"{key}: {hint}" for key, hint in hints.items() if not _is_json(hint)]:
        raise ConfigError(
            f"The tool {name} has {', '.join(unknown)}, which JSON cannot express; expected str, int, float, bool, None, list, "
            "tuple, dict, Literal, a TypedDict or a union of these. Use Literal in place of an enumeration."
        )
    return schema


def _is_json(hint: Any) -> bool:
    if isinstance(hint, type) and not get_args(hint):
        return hint in _JSON_TYPES or is_typeddict(hint)
    return all(map(_is_json, get_args(hint)))


def argument_validator(parameters: Mapping[str, Any]) -> Validator:
    """Return a validator of a tool's arguments; unlike in JSON schema, 3.0 is not an integer.

    Args:
        parameters: ``parameters`` of the tool's schema.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    # A tool may use an integer as an index, but Python rejects 3.0 as an index.
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    return extend(Draft202012Validator, type_checker=types)(_standard(parameters))


def _standard(schema: Any) -> Any:
    """Convert a schema of transformers to standard JSON schema: apply ``nullable``, and add the lengths of tuples."""
    if isinstance(schema, list):
        return [_standard(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    written = {key: _standard(value) for key, value in schema.items()}
    if isinstance(items := schema.get("prefixItems"), list):
        written |= {"minItems": len(items), "maxItems": len(items)}
    if schema.get("nullable") is True:
        written |= {key: [*written[key], more] for key, more in _NULL.items() if isinstance(written.get(key), list)}
        if isinstance(kind := schema.get("type"), str):
            written["type"] = [kind, "null"]
    return written


def find_mistake(validator: Validator, arguments: Mapping[str, Any]) -> str:
    """Return a message on the wrong argument and its expected value, at most 200 characters; empty if all are valid."""
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(arguments))
    if error is None:
        return ""
    path = error.json_path.removeprefix("$.")
    expected = json.dumps({str(error.validator): error.validator_value}, ensure_ascii=False)
    return f"{path:.40} is {error.instance!r:.60}, expected {expected:.80}"

"""Tools of an environment, and tool calls in responses: parsing, schemas and their checks, and the action of a call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args, get_type_hints, is_typeddict

import numpy as np

from trial_envs.core.projection import Projection
from trial_envs.tool_env import ToolEpisode, command_tools
from trial_ray.adapters.templates import ToolFormat
from trial_ray.errors import ChatTemplateError, ConfigError, MissingDependencyError, first_line
from trial_ray.models.model_shape import special_token_ids

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_MAX_SHOWN = 200
"""Maximum number of characters of a name, value or error that is quoted in the answer to a tool call or in an error message."""


# -- parsing of responses -------------------------------------------------------------------------------------------------


def prepare_parsing(tokenizer: Any, tool_format: ToolFormat | None) -> None:
    """Set how :func:`parse_response` reads a tokenizer's responses: in the Hermes format, or with its ``response_template``.

    A missing ``response_template`` is taken from TRL, which has response templates for published chat templates.

    Args:
        tokenizer: tokenizer of the model.
        tool_format: the run's ``tool_format``.

    Raises:
        MissingDependencyError: TRL is not installed.
        ChatTemplateError: TRL has no response template for the tokenizer's chat template.
    """
    tokenizer.tool_format = tool_format
    if tool_format is not None or getattr(tokenizer, "response_template", None) is not None:
        return
    needed = (
        "prompt_style='tools' parses calls with the tokenizer's response_template (transformers' response parsing), and this "
        "tokenizer has none"
    )
    own = "add response_template to the model's tokenizer_config.json, or set tool_format='hermes'"
    try:
        from trl.chat_template_utils import add_response_schema
    except ImportError as error:
        raise MissingDependencyError(
            f"{needed}. Install TRL, which has response templates for published chat templates (pip install trl), or {own}."
        ) from error
    try:
        add_response_schema(tokenizer)
    except ValueError as error:
        raise ChatTemplateError(f"{needed}, and TRL has none for its chat template; {own}.") from error


def parse_response(
    tokenizer: Any, response: str, prefix: str = "", tools: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Parse a response into a message with ``content``, ``tool_calls`` and reasoning, as far as it has them.

    Args:
        tokenizer: tokenizer that :func:`prepare_parsing` has prepared.
        response: text of the response, special tokens included.
        prefix: text of the prompt after its last message, which opens the response.
        tools: schemas of the tools; arguments written as text are converted to the types in the schemas.

    Raises:
        ValueError: the response cannot be parsed.
    """
    if tokenizer.tool_format == "hermes":
        return _parse_hermes(tokenizer, response, prefix)
    try:
        message: dict[str, Any] = tokenizer.parse_response(response, prefix=prefix, tools=tools)
        calls = message.get("tool_calls") or []
    except Exception as error:  # The response may be any text, and the parser may fail in any way.
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    return {**message, "tool_calls": calls if isinstance(calls, list) else [calls]}


_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def _parse_hermes(tokenizer: Any, response: str, prefix: str) -> dict[str, Any]:
    opening, closes, answer = response.rpartition("</think>")
    if not closes and prefix.rstrip().endswith("<think>"):
        opening, answer = answer, ""
    try:
        calls = [json.loads(call) for call in _CALL.findall(answer)]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {first_line(error)}") from error
    text = _CALL.sub("", answer)
    for token in special_token_ids(tokenizer):
        text = text.replace(tokenizer.decode([token]), "")
    reasoning = opening.strip().removeprefix("<think>").strip()
    return {"content": text, "tool_calls": calls, "reasoning_content": reasoning}


def last_calls(tokenizer: Any, ids: np.ndarray, number: int) -> np.ndarray:
    """Return a mask of the last ``number`` tool calls of a response and of all tokens after them, bool ``[y]``.

    Special tokens are not in the mask, which is all False if the response has fewer than ``number`` calls. The response is
    parsed from its end: without the prompt, parsing the whole response may fail on a call inside reasoning that the prompt
    opened.

    Args:
        tokenizer: tokenizer that :func:`prepare_parsing` has prepared.
        ids: int ``[y]``, the response.
        number: number of calls at the end of the response that the mask covers.
    """
    mask = np.zeros(len(ids), bool)
    for start in range(len(ids) - 1, -1, -1):
        with suppress(ValueError):
            if len(parse_response(tokenizer, tokenizer.decode(ids[start:]))["tool_calls"]) >= number:
                mask[start:] = ~np.isin(ids[start:], list(special_token_ids(tokenizer)))
                break
    return mask


# -- schemas ------------------------------------------------------------------------------------------------------------

_JSON_TYPES = (str, int, float, bool, list, tuple, dict, type(None), Any)
_NULL: Mapping[str, Any] = {"type": "null", "enum": None, "anyOf": {"type": "null"}}
"""Entry that lets a tool's argument be null, by JSON schema keyword; added to the list that a schema has under the keyword."""


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


# -- the tools of an environment ------------------------------------------------------------------------------------------


class ToolSet:
    """The tools of an environment.

    Args:
        tools: class with the tools as its public methods, as TRL offers them to the model.

    Attributes:
        schemas: schemas of the tools, in the order of their names, in the format of ``apply_chat_template``.
        several: whether a response may have several calls; if not, a response with several calls is refused.

    Raises:
        ConfigError: the class has no tools, a tool has no type hints or no docstring, or the text action into which its
            calls are translated depends on more than their arguments.
    """

    def __init__(self, tools: type[ToolEpisode]) -> None:
        self._commands, self.several = command_tools(tools), True
        if not self._commands:
            raise ConfigError(
                f"{tools.__name__} has no tools; expected public methods that return self._take(command)."
            )
        self.schemas = [tool_schema(f"{tools.__name__}.{name}", tool) for name, tool in self._commands.items()]
        self._validators = {
            name: argument_validator(schema["function"]["parameters"])
            for name, schema in zip(self._commands, self.schemas, strict=True)
        }
        for name, tool in self._commands.items():
            self._require_command(f"{tools.__name__}.{name}", tool)

    @staticmethod
    def _require_command(name: str, tool: Callable[..., Any]) -> None:
        """Require that a tool returns an action that depends only on its arguments."""
        try:
            action = None if inspect.iscoroutinefunction(tool) else tool(**_marks(tool))
        except AttributeError as error:
            action = error
        except Exception:  # The tool may reject arguments that are strings.
            return
        if not isinstance(action, str):
            raise ConfigError(
                f"The tool {name} returned {action!r:.{_MAX_SHOWN}}, expected an action as text. A tool only returns the "
                "action for its arguments, `return self._take(action)`, and the environment's step carries it out. For tools that "
                "change an object's state, as in TRL, use trial_envs.program.tool_program."
            )

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._commands)

    def project(self, calls: Sequence[Any]) -> Projection:
        """Return the actions of a response's calls.

        If a call or the response has no action, the projection is invalid and its answer states the mistake.
        docs/environments.md lists the mistakes.
        """
        if not calls:
            return self.refuse("No tool was called.")
        if len(calls) == 1:
            return self._project(calls[0])
        if not self.several:
            return self.refuse(f"{len(calls)} tools were called, so that none was carried out.")
        parts = [self._project(call) for call in calls]
        actions, answers = tuple(part.action for part in parts), tuple(part.answer for part in parts)
        action = "\n".join(filter(None, actions))
        return Projection(action, all(part.valid for part in parts), actions=actions, answers=answers)

    def _project(self, call: Any) -> Projection:
        name, arguments = read_call(call)
        if name not in self._commands:
            return self.refuse(f"There is no tool {name[:_MAX_SHOWN]!r}.")
        try:
            command = self._commands[name](**self._checked(name, arguments))
        except Exception as error:  # The arguments are from the model, and the tool may be a user's code.
            return self.refuse(f"{name} could not be called: {error!s:.{_MAX_SHOWN}}.")
        return Projection(command, True)

    def call_of(self, action: str) -> tuple[str, dict[str, str]] | None:
        """Return name and arguments of the tool call for an action (the inverse of :meth:`project`); ``None`` if there is none.

        All arguments are strings; tools that reject strings are skipped.
        """
        for name, tool in self._commands.items():
            marks = _marks(tool)
            try:
                pattern = re.escape(tool(**marks))
            except Exception:  # This tool rejects the placeholders, because they are strings.
                continue
            for argument, mark in marks.items():
                pattern = pattern.replace(mark, f"(?P<{argument}>.+)", 1)
            if match := re.fullmatch(pattern, action, re.DOTALL):
                return name, match.groupdict()
        return None

    def refuse(self, mistake: str) -> Projection:
        """Return an invalid projection without an action, for a response or call with a mistake.

        The projection's ``answer``, which the model receives, states the mistake and lists the tools that can be called.
        """
        offered = ", ".join(
            f"{name}({', '.join(inspect.signature(tool).parameters)})" for name, tool in self._commands.items()
        )
        amount = "one or more tools" if self.several else "exactly one tool"
        return Projection("", False, f"{mistake} Call {amount} in every turn: {offered}.")

    def _checked(self, name: str, arguments: Any) -> dict[str, Any]:
        """Return the arguments of a call if they follow the tool's schema.

        Raises:
            TypeError: an argument is missing, unknown or against the schema; the message names it.
        """
        if not isinstance(arguments, dict):
            raise TypeError(f"its arguments are {arguments!r:.{_MAX_SHOWN}}, expected an object")
        inspect.signature(self._commands[name]).bind(**arguments)
        if mistake := find_mistake(self._validators[name], arguments):
            raise TypeError(mistake)
        return arguments


def _marks(tool: Callable[..., Any]) -> dict[str, str]:
    """Return a placeholder for each argument of a tool, by which the argument can be located in the action."""
    return {name: f"\0{name}\0" for name in inspect.signature(tool).parameters}


def read_call(call: Any) -> tuple[str, Any]:
    """Return name and arguments of a call; the name is empty if ``call`` is not a call."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        return "", None
    arguments = function.get("arguments")
    return name, {} if arguments is None else arguments

"""Fields of requests to the translated chat APIs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

Fields = Mapping[str, Any]
JsonObject = dict[str, Any]
Event = tuple[str, JsonObject]
"""Name and data of a server-sent event."""
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
"""Types of text parts."""


def refuses_malformed(chat_request: Callable[[Fields], JsonObject]) -> Callable[[Fields], JsonObject]:
    """Decorate a translation of requests: it raises ``ValueError`` if a required field is missing or has another type."""

    @wraps(chat_request)
    def checked(body: Fields) -> JsonObject:
        try:
            return chat_request(body)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the request is malformed: {type(error).__name__}: {error}") from error

    return checked


def renamed(fields: Fields, *same: str, **names: str) -> JsonObject:
    """Return the fields that are set: those in ``same`` under their own names, and with ``new="old"`` the field old as new."""
    names |= {name: name for name in same}
    return {name: fields[field] for name, field in names.items() if fields.get(field) is not None}


def function_of(fields: Fields, kind: str, *same: str, **names: str) -> JsonObject:
    """Return the ``type`` and ``function`` of a tool, a tool choice or a tool call of chat completions.

    Raises:
        ValueError: the type is not ``kind``, for example the type of a built-in tool.
    """
    require(fields.get("type") or kind, (kind,), "the type of a tool")
    return {"type": "function", "function": renamed(fields, *same, **names)}


def require_known(fields: Fields, known: Collection[str], where: str) -> None:
    """Raise ``ValueError`` if an unknown field is set; a field with a false or empty value is not set."""
    for field, value in fields.items():
        if value:
            require(field, known, f"a field of {where}")


def require(found: str, possible: Collection[str], where: str) -> None:
    """Raise ``ValueError`` if ``found``, the name of a field or the type of a tool, item or part, is not ``possible``."""
    if found not in possible:
        names = ", ".join(sorted(possible))
        raise ValueError(f"{where} is {found!r}, which chat completions cannot express: expected one of {names}")


def text_of(content: str | Collection[Fields]) -> str:
    """Return the text of a message or a result, which is a string or a list of text parts.

    Raises:
        ValueError: a part is not text, for example an image.
    """
    if isinstance(content, str):
        return content
    for part in content:
        require(part["type"], TEXTS, "the type of a content part")
    return "".join(part["text"] for part in content)

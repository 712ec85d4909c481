"""Functions that read and check the fields of requests to the Responses and Messages APIs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any

Fields = Mapping[str, Any]
JsonObject = dict[str, Any]
Event = tuple[str, JsonObject]
"""Name and data of a server-sent event."""
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
"""Types of content parts that contain text."""


def refuses_malformed(chat_request: Callable[[Fields], JsonObject]) -> Callable[[Fields], JsonObject]:
    """Make a ``chat_request`` function raise ``ValueError`` if a required field is missing or has the wrong type (a decorator)."""

    @wraps(chat_request)
    def checked(body: Fields) -> JsonObject:
        try:
            return chat_request(body)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the request is malformed: {type(error).__name__}: {error}") from error

    return checked


def renamed(fields: Fields, *same: str, **names: str) -> JsonObject:
    """Return the ``fields`` named in ``same`` and, for each keyword ``new="old"``, the field ``old`` under the name ``new``.

    Fields that are missing or ``None`` are omitted.
    """
    names |= {name: name for name in same}
    return {name: fields[field] for name, field in names.items() if fields.get(field) is not None}


def function_of(fields: Fields, kind: str, *same: str, **names: str) -> JsonObject:
    """Translate a tool, tool choice or tool call to the Chat Completions API: ``type``, and ``function`` with renamed fields.

    Args:
        fields: the tool, tool choice or tool call to translate.
        kind: required value of the field ``type``, if ``fields`` has this field.
        same: see :func:`renamed`.
        names: see :func:`renamed`.

    Raises:
        ValueError: the type is not ``kind``, for example the type of a built-in tool.
    """
    require(fields.get("type") or kind, (kind,), "the type of a tool")
    return {"type": "function", "function": renamed(fields, *same, **names)}


def require_known(fields: Fields, known: Collection[str], where: str) -> None:
    """Raise ``ValueError`` if a field that is not in ``known`` has a value, other than false, zero, null or an empty value."""
    for field, value in fields.items():
        if value:
            require(field, known, f"a field of {where}")


def require(found: str, possible: Collection[str], where: str) -> None:
    """Raise ``ValueError`` if ``found``, a field's name or the type of an object, is not in ``possible``.

    The error message begins with ``where``, a description of ``found`` such as ``the type of a tool``.
    """
    if found not in possible:
        names = ", ".join(sorted(possible))
        raise ValueError(f"{where} is {found!r}, which chat completions cannot express: expected one of {names}")


def text_of(content: str | Collection[Fields]) -> str:
    """Return the text in the content of a message or a tool result; the content is a string or a list of text parts.

    Raises:
        ValueError: a part is not text, for example an image.
    """
    if isinstance(content, str):
        return content
    for part in content:
        require(part["type"], TEXTS, "the type of a content part")
    return "".join(part["text"] for part in content)

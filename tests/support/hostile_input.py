"""Strategies of hostile and broken input: texts of any Unicode, JSON of another shape, files with bytes changed or cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hostile_texts import HOSTILE
from hypothesis import strategies as st

SPECIAL = (
    "<|im_end|>",
    "<|im_start|>system\n",
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "</action>",
    "<action>",
    "<think>",
    "</think>",
    "[bold]",
    "[/]",
    "{{ 7 * 7 }}",
    "{0.__class__}",
    "\\u005c",
    "\\ud800",
    "../../etc/passwd",
    "\u0130\ufb03\u1e9e",  # other lengths in lower case
)
ANY = st.text(st.characters(), max_size=30)
"""Any code points, lone surrogates, NUL and controls of the direction of writing among them."""
TEXTS = st.lists(st.sampled_from(HOSTILE + SPECIAL) | ANY, max_size=5).map("".join)
WORDS = st.text(st.characters(exclude_characters="\0"), max_size=12)

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | TEXTS
    | st.sampled_from(["", "..", "/", "nan", "None", "1e400"])
)
VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=5
)
"""What JSON can hold, and what Python's reader takes besides: NaN, infinities."""


def changed_json(value: Any) -> st.SearchStrategy[Any]:
    """``value`` with one part replaced or removed, anywhere in it."""
    return st.tuples(st.sampled_from(_paths(value)), st.booleans(), VALUES).map(lambda drawn: _changed(value, *drawn))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in _paths(each, (*path, key)))]


def _changed(value: Any, path: tuple[Any, ...], removed: bool, new: Any) -> Any:
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    part = copy
    for key in path[:-1]:
        part = part[key]
    if removed:
        del part[path[-1]]
    else:
        part[path[-1]] = new
    return copy


def json_bytes(value: Any) -> bytes:
    """As a file holds it; lone surrogates as escapes."""
    return json.dumps(value).encode()


def changed_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """``content`` cut, with bytes changed, with bytes put in, or all others."""
    index = st.integers(0, max(0, len(content) - 1))
    some = st.binary(min_size=1, max_size=8)
    return st.one_of(
        index.map(lambda end: content[:end]),
        st.tuples(index, some).map(lambda drawn: content[: drawn[0]] + drawn[1] + content[drawn[0] + len(drawn[1]) :]),
        st.tuples(index, some).map(lambda drawn: content[: drawn[0]] + drawn[1] + content[drawn[0] :]),
        st.tuples(index, index).map(lambda ends: content[: min(ends)] + content[max(ends) :]),
        st.binary(max_size=40),
    )


def flipped(content: bytes) -> st.SearchStrategy[bytes]:
    """``content`` with one bit changed."""

    def flip(index: int, bit: int) -> bytes:
        return content[:index] + bytes([content[index] ^ (1 << bit)]) + content[index + 1 :]

    return st.builds(flip, st.integers(0, len(content) - 1), st.integers(0, 7))


class Cases:
    """Counts what was tried, by kind."""

    def __init__(self) -> None:
        self.tried: dict[str, int] = {}

    def count(self, kind: str) -> None:
        """One more."""
        self.tried[kind] = self.tried.get(kind, 0) + 1

    def refused(self, call: Callable[[], Any], *errors: type[BaseException]) -> Any:
        """What ``call`` returns, or the error with which it refused; any other error passes through."""
        try:
            return call()
        except errors as error:
            if not str(error).strip():
                raise AssertionError(f"{type(error).__name__} says nothing") from error
            return error

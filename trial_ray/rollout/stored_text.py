r"""Texts as bytes: UTF-8 has no form for lone surrogates, which environments may nevertheless show.

Parquet stores a lone surrogate as six characters, such as ``\udc80``. A backslash of the text that would read as the beginning
of such an escape is itself stored as ``\u005c``, so that every text comes back as it was.
"""

from __future__ import annotations

import hashlib
import re

_TO_ESCAPE = re.compile(r"[\ud800-\udfff]|\\(?=u(?:d[89a-f][0-9a-f]{2}|005c))")
_ESCAPE = re.compile(r"\\u(d[89a-f][0-9a-f]{2}|005c)")


def escaped(text: str) -> str:
    """``text`` without lone surrogates."""
    return _TO_ESCAPE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def unescaped(text: str) -> str:
    """The text that :func:`escaped` was given."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)


def text_digest(text: str) -> bytes:
    """SHA-256 of a text, lone surrogates included."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

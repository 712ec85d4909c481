"""Untrusted text made safe to look at: what a terminal or a browser would act on is shown instead."""

from __future__ import annotations

_CONTROL_PICTURES = 0x2400
_DELETE, _DELETE_PICTURE = "\x7f", "\N{SYMBOL FOR DELETE}"


def visible(text: str) -> str:
    """The text with everything but line breaks and printable characters spelled out.

    Control characters become their Unicode pictures (``␛`` for escape), all else that is not printable (lone surrogates,
    controls of the writing direction, line and paragraph separators, blanks of no width) its code point, ``⟨U+202E⟩``.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char == "\n" or char.isprintable() else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    if char < " ":
        return chr(_CONTROL_PICTURES + ord(char))
    return _DELETE_PICTURE if char == _DELETE else f"⟨U+{ord(char):04X}⟩"

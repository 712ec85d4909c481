"""The text of each token, so that the texts of a sequence's tokens add up to the text of the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_MOST_PIECES = 4
"""Bytes of the longest character in UTF-8, hence most tokens that may share one."""


class TokenTexts:
    """Texts of tokens by id, each decoded once.

    A tokenizer drops the blank before the first word of what it decodes; every token is therefore decoded behind another one.
    Tokens that hold a part of a character only are decoded together: the first of them has the text, the others have none.

    Args:
        tokenizer: a ``transformers`` tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode([]))
        self._size = len(tokenizer)
        self._known: dict[int, str] = {}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """One text a token.

        Args:
            ids: token ids ``[T]``; those outside of the vocabulary are spelled as ``⟨id 99999⟩``.
        """
        known = self._known
        for new in set(ids) - known.keys():
            known[new] = self._text_of(new)
        found = [known[each] for each in ids]
        if any(_INCOMPLETE in text for text in found):
            self._join(ids, found)
        return found

    def _join(self, ids: Sequence[int], found: list[str]) -> None:
        """Give the text of characters that span tokens to the first of their tokens."""
        index = 0
        while index < len(found):
            if _INCOMPLETE in found[index]:
                for stop in range(index + 2, min(index + _MOST_PIECES, len(found)) + 1):
                    whole = self._decode(ids[index:stop])[self._skipped :]
                    if _INCOMPLETE not in whole:
                        found[index:stop] = [whole, *[""] * (stop - index - 1)]
                        break
            index += 1

    def _text_of(self, token: int) -> str:
        # A model may have more ids than its tokenizer.
        return self._decode([token])[self._skipped :] if 0 <= token < self._size else f"⟨id {token}⟩"

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode([*self._anchor, *ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

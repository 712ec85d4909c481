"""Tokenisation of text that was written outside of the program: observations, product pages, admissible actions."""

from __future__ import annotations

from typing import Any


def encode_untrusted(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` in which no special token can appear, whatever the text spells.

    ``<|im_end|>`` in an observation is tokenised as the characters that it consists of, so that it cannot end the
    message it stands in. Nothing is added in front or behind. Lone surrogates, which have no UTF-8 form, become ``?``.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        text: any text.
    """
    well_formed = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    ids: list[int] = tokenizer.encode(well_formed, add_special_tokens=False, split_special_tokens=True)
    return ids

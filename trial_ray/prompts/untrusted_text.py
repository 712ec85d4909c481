"""Encode text of environments, whatever it spells, without control tokens."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

REASONING_TAGS = frozenset({"<think>", "</think>"})
"""Separate tokens in many tokenizers, special tokens in some; they do not delimit messages."""
_controls: WeakKeyDictionary[Any, tuple[Any, dict[int, str]]] = WeakKeyDictionary()


def ordinary_controls(tokenizer: Any) -> dict[int, str]:
    """Return added tokens by id that are not special but appear in the chat template, such as DeepSeek's ``<｜User｜>``."""
    template = getattr(tokenizer, "chat_template", None)
    cached = _controls.get(tokenizer)
    if cached is None or cached[0] != template:
        source = str(template)
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if not token.special}
        controls = {id_: text for id_, text in added.items() if text in source and _is_control(text)}
        cached = _controls[tokenizer] = template, controls
    return cached[1]


def _is_control(text: str) -> bool:
    """Return whether a token has both marks and letters: words and line breaks (Gemma has such tokens) do not."""
    return text not in REASONING_TAGS and any(map(str.isalpha, text)) and not text.replace(" ", "").isalnum()


def encode_untrusted(tokenizer: Any, text: str) -> list[int]:
    """Return token ids of ``text`` without any control token, whatever the text spells.

    ``<|im_end|>`` in an observation is tokenised as its characters, so it cannot end the message that contains it. The same
    applies to :func:`ordinary_controls`. Nothing is added before or after the text. Lone surrogates, which have no UTF-8
    form, become ``?``.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        text: any text.
    """
    well_formed = text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    ids = _encode(tokenizer, well_formed)
    if (controls := ordinary_controls(tokenizer)) and not controls.keys().isdisjoint(ids):
        starts = re.finditer(f"(?={'|'.join(map(re.escape, controls.values()))})", well_formed)
        cuts = [0, *(match.start() + 1 for match in starts), len(well_formed)]
        ids = [id_ for cut in pairwise(cuts) for id_ in _encode(tokenizer, well_formed[slice(*cut)])]
        if not controls.keys().isdisjoint(ids):  # The tokenizer normalises another spelling of a control token.
            ids = [id_ for char in well_formed for id_ in _encode(tokenizer, char)]
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text; special tokens in it are encoded as ordinary text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        slow_ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return slow_ids
    # Call the backend directly: transformers spends most of its time on masks and offsets. Change its settings only if they differ,
    # because another thread may be encoding.
    if not backend.encode_special_tokens:
        backend.encode_special_tokens = True
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids

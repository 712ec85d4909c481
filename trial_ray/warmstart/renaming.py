"""Random renaming of things in examples, so that a response can only be right by copying names out of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Renamer:
    """Exchanges names within their kind, the same way throughout one example.

    A small model first learns which names are common ("desks have desk lamps") and then names things that are not there.
    Where names are exchanged at random, that cannot help it. (No gain in success was measured; see docs/decisions.md.)

    Args:
        tokenizer: names that are not one token to it stay as they are.
        groups: names that may stand for each other.
    """

    def __init__(self, tokenizer: Any, groups: Sequence[Sequence[str]]) -> None:
        self._size = len(tokenizer)
        self._forms = [self._ids(tokenizer, names) for names in groups]

    @staticmethod
    def _ids(tokenizer: Any, names: Sequence[str]) -> np.ndarray:
        """Token ids of each name, int64 ``[names, forms]``: without and with a blank before it, or only as it is written."""
        encoded = [[tokenizer.encode(blank + name, add_special_tokens=False) for name in names] for blank in ("", " ")]
        written = [form for form in encoded if any(len(ids) == 1 for ids in form)]
        whole = (forms for forms in zip(*written, strict=True) if all(len(ids) == 1 for ids in forms))
        rows = [[ids[0] for ids in forms] for forms in whole]
        return np.array(rows, np.int64).reshape(len(rows), -1)

    def table(self, generator: np.random.Generator) -> np.ndarray:
        """A random exchange of names, int32 ``[vocabulary]``: new id of every id."""
        table = np.arange(self._size, dtype=np.int32)
        for forms in self._forms:
            if len(forms):
                table[forms] = forms[generator.permutation(len(forms))]
        return table

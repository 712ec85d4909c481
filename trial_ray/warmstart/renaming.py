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
        """Token ids of each name without and with the blank before it, int64 ``[names, 2]``."""
        forms = [[tokenizer.encode(blank + name, add_special_tokens=False) for blank in ("", " ")] for name in names]
        single = [(bare[0], spaced[0]) for bare, spaced in forms if len(bare) == len(spaced) == 1]
        return np.array(single, np.int64).reshape(-1, 2)

    def table(self, generator: np.random.Generator) -> np.ndarray:
        """A random exchange of names, int32 ``[vocabulary]``: new id of every id."""
        table = np.arange(self._size, dtype=np.int32)
        for forms in self._forms:
            if len(forms):
                table[forms] = forms[generator.permutation(len(forms))]
        return table

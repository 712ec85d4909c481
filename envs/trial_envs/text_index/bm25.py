"""Lucene's BM25 arithmetic: term scores are 32-bit floats, and document lengths are quantised as in Lucene's index."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

K1 = np.float32(0.9)
B = np.float32(0.4)

_EXACT_LENGTHS = 24
"""Lucene stores document lengths below this number exactly. For other lengths, Lucene subtracts this number and rounds
the difference down to its four highest bits."""


def quantise_length(length: int) -> int:
    """Return the length that Lucene stores for a document of ``length`` terms (``SmallFloat.intToByte4`` and back)."""
    if length < _EXACT_LENGTHS:
        return length
    excess = length - _EXACT_LENGTHS
    shift = max(excess.bit_length() - 4, 0)
    return _EXACT_LENGTHS + ((excess >> shift) << shift)


def inverse_norms(lengths: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return ``1 / (k1 · (1 - b + b · length / average))`` of every document, with the length that Lucene stores.

    Args:
        lengths: number of terms of every document ``[N]``; their average is over documents with at least one term.
    """
    documents = int(np.count_nonzero(lengths))
    average = np.float32(float(lengths.sum()) / max(documents, 1)) if documents else np.float32(1)
    distinct, inverse = np.unique(lengths, return_inverse=True)
    kept = np.array([quantise_length(int(length)) for length in distinct], dtype=np.float32)
    one = np.float32(1)
    return (one / (K1 * ((one - B) + B * kept / average)))[inverse].astype(np.float32)


def inverse_document_frequency(documents: int, frequency: int) -> np.float32:
    """Return ``ln(1 + (N - n + ½) / (n + ½))`` for a term that n (``frequency``) of N (``documents``) documents contain."""
    return np.float32(math.log(1 + (documents - frequency + 0.5) / (frequency + 0.5)))


def term_scores(weight: np.float32, saturations: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the contribution of a query term to the score of each document that has it, ``[n]``.

    Args:
        weight: inverse document frequency times the term's count in the query.
        saturations: term frequency times inverse norm, ``[n]``.
    """
    return weight - weight / (np.float32(1) + saturations)

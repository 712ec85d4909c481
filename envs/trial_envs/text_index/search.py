"""Search in an inverted index on disk, with Lucene's ranking.

Term-at-a-time BM25 over memory-mapped postings: 64-bit sums of 32-bit terms, rounded to 32 bits; equal scores are
ordered by the ranks that were written with the index.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trial_envs.text_index.analyser import index_terms
from trial_envs.text_index.bm25 import inverse_document_frequency, term_scores
from trial_envs.text_index.records import RecordFile, load_array

MAX_RESULTS = 50
MAX_QUERY_TERMS = 1024
"""Maximum number of different terms in a query, Lucene's limit of clauses."""

SPARSE = 8
"""Postings are sorted rather than added to an array of all documents if there are fewer than this fraction of the documents."""


class TooManyTermsError(Exception):
    """A query has more than :data:`MAX_QUERY_TERMS` different terms."""


def term_hash(term: str) -> int:
    """Return the 64-bit hash of a term, the sort key of the dictionary."""
    return int.from_bytes(hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class SearchIndex:
    """The inverted index of a folder; safe to read from many threads.

    Raises:
        CorruptCatalogueError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, documents: int) -> None:
        self._documents = documents
        self._terms = RecordFile(folder, "terms")
        self._hashes = load_array(folder, "term_hashes", np.uint64)
        self._starts = load_array(folder, "posting_starts", np.int64)
        self._positions = load_array(folder, "posting_documents", np.int32)
        self._saturations = load_array(folder, "posting_saturations", np.float32)
        self._tie_ranks = load_array(folder, "tie_ranks", np.int32)

    def search(self, query: str, limit: int = MAX_RESULTS) -> NDArray[np.int64]:
        """Return the positions of the best documents, best first, at most ``limit``.

        Raises:
            TooManyTermsError: the query has more than ``MAX_QUERY_TERMS`` different terms.
        """
        return self.rank(query, limit)[0]

    def rank(self, query: str, limit: int = MAX_RESULTS) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the result of :meth:`search` and the scores."""
        found: list[NDArray[np.int32]] = []
        parts: list[NDArray[np.float32]] = []
        for term, count in _count_terms(query).items():
            number = self._number(term)
            if number is None:
                continue
            start, end = self._starts[number : number + 2].tolist()
            weight = np.float32(count) * inverse_document_frequency(self._documents, end - start)
            found.append(self._positions[start:end])
            parts.append(term_scores(weight, self._saturations[start:end]))
        matches, scores = self._add(found, parts)
        if len(matches) > limit:
            threshold = np.partition(scores, len(scores) - limit)[len(scores) - limit]
            matches, scores = matches[scores >= threshold], scores[scores >= threshold]
        order = np.lexsort((self._tie_ranks[matches], -scores))[:limit]
        return matches[order], scores[order]

    def _add(
        self, found: list[NDArray[np.int32]], parts: list[NDArray[np.float32]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the documents of some terms, ascending, and the sums of their parts, which are added in the order of the terms."""
        if 0 < sum(map(len, found)) < len(self._tie_ranks) // SPARSE:
            documents, which = np.unique(np.concatenate(found), return_inverse=True)
            return documents.astype(np.int64), np.bincount(which, np.concatenate(parts)).astype(np.float32)
        sums = np.zeros(len(self._tie_ranks))
        for positions, part in zip(found, parts, strict=True):
            sums[positions] += part
        matches = np.flatnonzero(sums != 0)  # several times as fast as for the numbers
        return matches, sums[matches].astype(np.float32)

    def _number(self, term: str) -> int | None:
        """Return the term's position in the dictionary."""
        wanted = np.uint64(term_hash(term))
        number = int(np.searchsorted(self._hashes, wanted))
        while number < len(self._hashes) and self._hashes[number] == wanted:
            if self._terms[number] == term.encode("utf-8", "surrogatepass"):
                return number
            number += 1
        return None


def _count_terms(query: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for term in index_terms(query):
        counts[term] += 1
        if len(counts) > MAX_QUERY_TERMS:
            raise TooManyTermsError
    return counts

"""Search in an inverted index on disk, with Lucene's ranking.

The search is term-at-a-time BM25 over memory-mapped postings. Scores are 64-bit sums of 32-bit term scores, rounded to 32
bits; documents with equal scores are ordered by the index's array ``tie_ranks``.
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
"""Maximum number of different terms in a query, the same as Lucene's limit on clauses."""

SPARSE = 8
"""If the terms of a query have fewer postings than the number of documents divided by this number, the scores are summed by
sorting the postings, not in an array with one element per document."""


class TooManyTermsError(Exception):
    """A query has more than :data:`MAX_QUERY_TERMS` different terms."""


def term_hash(term: str) -> int:
    """Return the 64-bit hash of a term, by which the index's dictionary of terms is sorted."""
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
        """Return the positions of the documents with the highest scores for a query, best first, at most ``limit``.

        Raises:
            TooManyTermsError: the query has more than ``MAX_QUERY_TERMS`` different terms.
        """
        return self.rank(query, limit)[0]

    def rank(self, query: str, limit: int = MAX_RESULTS) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the documents that :meth:`search` returns, and their scores."""
        documents_by_term: list[NDArray[np.int32]] = []
        scores_by_term: list[NDArray[np.float32]] = []
        for term, count in _count_terms(query).items():
            number = self._number(term)
            if number is None:
                continue
            start, end = self._starts[number : number + 2].tolist()
            weight = np.float32(count) * inverse_document_frequency(self._documents, end - start)
            documents_by_term.append(self._positions[start:end])
            scores_by_term.append(term_scores(weight, self._saturations[start:end]))
        matches, scores = self._add(documents_by_term, scores_by_term)
        if len(matches) > limit:
            threshold = np.partition(scores, len(scores) - limit)[len(scores) - limit]
            matches, scores = matches[scores >= threshold], scores[scores >= threshold]
        order = np.lexsort((self._tie_ranks[matches], -scores))[:limit]
        return matches[order], scores[order]

    def _add(
        self, documents_by_term: list[NDArray[np.int32]], scores_by_term: list[NDArray[np.float32]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the documents that have any of the query's terms, ascending, and their scores, summed term by term."""
        if 0 < sum(map(len, documents_by_term)) < len(self._tie_ranks) // SPARSE:
            documents, inverse = np.unique(np.concatenate(documents_by_term), return_inverse=True)
            return documents.astype(np.int64), np.bincount(inverse, np.concatenate(scores_by_term)).astype(np.float32)
        sums = np.zeros(len(self._tie_ranks))
        for positions, term_score in zip(documents_by_term, scores_by_term, strict=True):
            sums[positions] += term_score
        matches = np.flatnonzero(sums != 0)  # flatnonzero() is several times as fast for booleans as for numbers.
        return matches, sums[matches].astype(np.float32)

    def _number(self, term: str) -> int | None:
        """Return the term's position in the dictionary; ``None`` if no document has the term."""
        term_key = np.uint64(term_hash(term))
        number = int(np.searchsorted(self._hashes, term_key))
        while number < len(self._hashes) and self._hashes[number] == term_key:
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

"""Builds an inverted index in one pass over the documents and two passes over their postings, which are stored in a file."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trial_envs.text_index.bm25 import inverse_norms
from trial_envs.text_index.records import Scalar, save_array, write_records
from trial_envs.text_index.search import term_hash

RUN = 4_000_000
"""Number of postings that the builder collects in memory before it writes them, as one run, to a temporary file."""


class IndexBuilder:
    """Builds an index: ``add`` collects the terms of the documents, ``finish`` writes the index.

    Postings (a term, a document and a count) are written to a file in the order of the documents, in runs of bounded size. When
    the number of postings of every term is known, the postings of each run are copied to their final positions, so the postings
    of a term are sorted by document.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs_path = folder / "runs.tmp"
        self._runs = self._runs_path.open("wb")
        self._run_sizes: list[int] = []
        self._numbers: dict[str, int] = {}
        self._lengths = array("q")
        self._terms, self._documents, self._counts = array("i"), array("i"), array("i")

    def add(self, terms: Iterable[str]) -> None:
        """Add the next document, given by its terms."""
        counts = Counter(terms)
        document = len(self._lengths)
        self._lengths.append(sum(counts.values()))
        for term, count in counts.items():
            self._terms.append(self._numbers.setdefault(term, len(self._numbers)))
            self._documents.append(document)
            self._counts.append(count)
        if len(self._terms) >= RUN:
            self._flush()

    def finish(self) -> int:
        """Write the index; return the number of documents with at least one term."""
        self._flush()
        self._runs.close()
        ranks, sizes = self._write_dictionary()
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        save_array(self._folder, "posting_starts", starts, "int64")
        lengths = np.array(self._lengths, dtype=np.int64)
        self._scatter(ranks, starts, inverse_norms(lengths))
        self._runs_path.unlink()
        return int(np.count_nonzero(lengths))

    def _flush(self) -> None:
        if self._terms:
            for column in (self._terms, self._documents, self._counts):
                column.tofile(self._runs)
            self._run_sizes.append(len(self._terms))
            self._terms, self._documents, self._counts = array("i"), array("i"), array("i")

    def _columns(self) -> Iterable[NDArray[np.int32]]:
        """Yield the runs of postings, each as an int32 array ``[3, n]``: term numbers, document numbers, numbers of occurrences."""
        with self._runs_path.open("rb") as stream:
            for size in self._run_sizes:
                yield np.fromfile(stream, dtype=np.int32, count=3 * size).reshape(3, size)

    def _write_dictionary(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Write the terms sorted by hash; return each term's position in this order, and the number of postings per position."""
        terms = list(self._numbers)
        hashes = np.array([term_hash(term) for term in terms], dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        save_array(self._folder, "term_hashes", hashes[order], "uint64")
        write_records(self._folder, "terms", (terms[number].encode("utf-8", "surrogatepass") for number in order))
        ranks = np.empty(len(terms), dtype=np.int64)
        ranks[order] = np.arange(len(terms))
        sizes = np.zeros(len(terms), dtype=np.int64)
        for numbers, _, _ in self._columns():
            sizes += np.bincount(ranks[numbers], minlength=len(terms))
        return ranks, sizes

    def _scatter(self, ranks: NDArray[np.int64], starts: NDArray[np.int64], norms: NDArray[np.float32]) -> None:
        """Write the postings of all runs to the index, sorted by term and document."""
        total = int(starts[-1])
        all_documents = self._new_array("posting_documents", np.int32, total)
        saturations = self._new_array("posting_saturations", np.float32, total)
        cursors = starts[:-1].copy()
        for numbers, documents, counts in self._columns():
            lists = ranks[numbers]
            order = np.argsort(lists, kind="stable")
            lists = lists[order]
            within = np.arange(len(lists)) - np.searchsorted(lists, lists)
            positions = cursors[lists] + within
            all_documents[positions] = documents[order]
            saturations[positions] = counts[order].astype(np.float32) * norms[documents[order]]
            cursors += np.bincount(lists, minlength=len(cursors))
        all_documents.flush()
        saturations.flush()

    def _new_array(self, name: str, scalar: type[Scalar], size: int) -> np.memmap[tuple[int], np.dtype[Scalar]]:
        path = self._folder / f"{name}.npy"
        created: np.memmap[tuple[int], np.dtype[Scalar]] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            path, mode="w+", dtype=scalar, shape=(size,)
        )
        return created

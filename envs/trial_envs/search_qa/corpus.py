"""A corpus with its questions on disk, memory-mapped and read-only: passages, BM25 index, and the questions of each split.

All environments of a process with the same corpus share one object, also across threads. Processes share the mapped memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trial_envs.errors import CorruptCatalogueError, UnknownSplitError
from trial_envs.webshop.analyser import index_terms
from trial_envs.webshop.catalogue import Groups, checked_manifest, open_index
from trial_envs.webshop.index_writer import write_folder
from trial_envs.webshop.indexing import IndexBuilder
from trial_envs.webshop.records import REBUILD, RecordFile, RecordWriter, save_array, write_records
from trial_envs.webshop.search import SearchIndex


class Passage(NamedTuple):
    """A passage of a corpus."""

    title: str
    text: str


class Question(NamedTuple):
    """A question.

    Attributes:
        text: the question.
        answers: accepted answers, at least one.
        family: kind of question, or the data set that it comes from.
        searches: queries whose results contain the answer; empty if they are not known.
    """

    text: str
    answers: tuple[str, ...]
    family: str
    searches: tuple[str, ...] = ()


class Corpus:
    """The passages and questions of an index folder.

    Attributes:
        folder: the folder.
        splits: records of the questions by split.

    Raises:
        CorruptCatalogueError: a file is missing or differs from the manifest.
    """

    def __init__(self, folder: Path) -> None:
        manifest = checked_manifest(folder)
        self.folder = folder
        self.splits = {split: RecordFile(folder, f"questions-{split}") for split in manifest["groups"]["splits"]}
        self._passages = RecordFile(folder, "passages")
        self._index = SearchIndex(folder, manifest["documents"])

    def __str__(self) -> str:
        questions = ", ".join(f"{split} {len(records):,}" for split, records in self.splits.items())
        return f"{self.num_passages:,} passages, questions: {questions}"

    @property
    def num_passages(self) -> int:
        """Number of passages; 0 if only questions were imported."""
        return len(self._passages)

    def num_questions(self, split: str) -> int:
        """Return the number of questions of a split.

        Raises:
            UnknownSplitError: there are no questions of this split.
        """
        if split not in self.splits:
            raise UnknownSplitError(
                f"{self.folder} has no questions of the split {split!r}; expected one of {', '.join(self.splits)}."
            )
        return len(self.splits[split])

    def question(self, split: str, number: int) -> Question:
        """Return a question of a split, numbered from 0."""
        try:
            text, answers, family, searches = json.loads(self.splits[split][number])
        except ValueError as error:
            raise CorruptCatalogueError(f"{self.folder}: question {number} of {split} is damaged. {REBUILD}") from error
        return Question(text, tuple(answers), family, tuple(searches))

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return the passages with the highest BM25 scores for a query, best first, at most ``top_k``.

        Raises:
            TooManyTermsError: the query has too many different terms.
        """
        positions = self._index.search(query, top_k).tolist()
        return [read_passage(self._passages[position].decode("utf-8", "surrogatepass")) for position in positions]


def read_passage(contents: str) -> Passage:
    """Return the passage of a text whose first line is the title, which may be quoted."""
    title, _, text = contents.partition("\n")
    return Passage(title.strip().strip('"'), text.strip())


def write_corpus(
    target: Path,
    passages: Iterable[Passage],
    splits: Mapping[str, Iterable[Question]],
    source: Mapping[str, object],
    replace: bool = False,
) -> Path:
    """Write the index folder of a corpus in one pass over passages and questions.

    Args:
        target: the folder.
        passages: in the order of the corpus; passages with equal scores are returned in this order.
        splits: questions by split; the names of the splits are parts of file names.
        source: origin of the data, which is written to the manifest.
        replace: whether an existing folder is replaced; otherwise it is kept.

    Returns:
        The folder.

    Raises:
        FileExistsError, CorruptCatalogueError: see :func:`trial_envs.webshop.index_writer.write_folder`.
    """

    def write(folder: Path) -> tuple[Groups, int]:
        records, index = RecordWriter(folder, "passages"), IndexBuilder(folder)
        for passage in passages:
            contents = "\n".join(passage)
            records.append(contents.encode("utf-8", "surrogatepass"))
            index.add(index_terms(contents))
        records.close()
        save_array(folder, "asin_ranks", np.arange(len(RecordFile(folder, "passages"))), "int32")
        for split, questions in splits.items():
            write_records(folder, f"questions-{split}", (json.dumps(question).encode() for question in questions))
        return {"splits": list(splits)}, index.finish()

    return write_folder(target, write, source, replace)


def open_corpus(folder: Path) -> Corpus:
    """Open an index folder; arguments and errors as in :func:`trial_envs.webshop.catalogue.open_index`."""
    return open_index(folder, Corpus)

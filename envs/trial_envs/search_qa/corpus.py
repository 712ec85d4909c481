"""A corpus with its questions on disk, memory-mapped and read-only: passages, BM25 index, and the questions of each split.

All environments and threads of a process that use the same corpus share one :class:`Corpus`. Processes share the mapped
memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from trial_envs.core.cache import cache_folder
from trial_envs.errors import CorruptCatalogueError, MissingDataError, UnknownSplitError
from trial_envs.search_qa.world import VERSION, Passage, Question, World
from trial_envs.text_index.analyser import index_terms
from trial_envs.text_index.folder import (
    MANIFEST,
    Groups,
    checked_manifest,
    content_key,
    find_index,
    open_index,
    write_folder,
)
from trial_envs.text_index.indexing import IndexBuilder
from trial_envs.text_index.records import REBUILD, RecordFile, RecordWriter, save_array, write_records
from trial_envs.text_index.search import SearchIndex

DATA_VARIABLE = "SEARCH_QA_DATA"
IMPORTED = "search-qa"
"""Name of the imported corpus in the cache, which environments use if no folder is given."""
GENERATED = ("generated", "generated_valid", "generated_test")
"""Splits with questions about generated worlds; each split has its own worlds."""
MAX_QUERY = 1000
"""Maximum length of a query in characters; the rest is ignored. A query of this length has fewer than ``MAX_QUERY_TERMS`` terms."""
MAX_OPEN = 256
"""Maximum number of generated worlds whose files a process maps into memory at a time."""


class Corpus:
    """The passages and questions of an index folder.

    Attributes:
        folder: the index folder.
        splits: split -> file with the records of its questions.

    Raises:
        CorruptCatalogueError: a file is missing or does not match the manifest of the index folder.
    """

    def __init__(self, folder: Path) -> None:
        manifest = checked_manifest(folder)
        self.folder = folder
        self.splits = {
            split: RecordFile(folder, f"questions-{number}")
            for number, split in enumerate(manifest["groups"].get("splits", ()))
        }
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
            UnknownSplitError: the corpus has no questions of this split.
        """
        if split not in self.splits:
            raise UnknownSplitError(
                f"{self.folder} has no questions of the split {split!r}; expected one of {', '.join(self.splits)}."
            )
        return len(self.splits[split])

    def question(self, split: str, number: int) -> Question:
        """Return question ``number`` of a split, counted from 0."""
        try:
            text, answers, family, searches = json.loads(self.splits[split][number])
        except ValueError as error:
            raise CorruptCatalogueError(f"{self.folder}: question {number} of {split} is damaged. {REBUILD}") from error
        return Question(text, tuple(answers), family, tuple(searches))

    def search(self, query: str, top_k: int) -> list[Passage]:
        """Return the passages with the highest BM25 scores for a query, best first, at most ``top_k``.

        Only the first :data:`MAX_QUERY` characters of the query are used.
        """
        positions = self._index.search(query[:MAX_QUERY], top_k).tolist()
        return [read_passage(self._passages[position].decode("utf-8", "surrogatepass")) for position in positions]


def read_passage(contents: str) -> Passage:
    """Parse a text whose first line is the title of a passage, with or without quotation marks."""
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
        target: the index folder to create.
        passages: passages in the order of the corpus; a search returns passages with equal scores in this order.
        splits: questions by split.
        source: origin of the data, which is written to the manifest.
        replace: whether an existing folder is replaced; otherwise it is kept.

    Returns:
        The folder.

    Raises:
        FileExistsError, CorruptCatalogueError: see :func:`trial_envs.text_index.folder.write_folder`.
    """

    def write(folder: Path) -> tuple[Groups, int]:
        records, index = RecordWriter(folder, "passages"), IndexBuilder(folder)
        for passage in passages:
            contents = "\n".join(passage)
            records.append(contents.encode("utf-8", "surrogatepass"))
            index.add(index_terms(contents))
        records.close()
        save_array(folder, "tie_ranks", np.arange(len(RecordFile(folder, "passages"))), "int32")
        for number, questions in enumerate(splits.values()):
            write_records(folder, f"questions-{number}", (json.dumps(question).encode() for question in questions))
        return {"splits": list(splits)}, index.finish()

    return write_folder(target, write, source, replace)


def find_data(data: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder ``data``, else the folder that ``SEARCH_QA_DATA`` names, else the imported corpus, else ``None``."""
    return find_index(data, DATA_VARIABLE, IMPORTED)


def open_data(data: str | os.PathLike[str] | None) -> Corpus:
    """Open the corpus in the folder ``data``; ``None`` selects ``SEARCH_QA_DATA``, else the corpus that was imported last.

    Raises:
        MissingDataError: the folder has no corpus, or no folder was given and no corpus was imported.
        CorruptCatalogueError: the content of the folder is damaged.
    """
    folder = find_data(data)
    if folder is None or not (folder / MANIFEST).is_file():
        where = "no folder was given, and nothing was imported" if folder is None else f"{folder} has no {MANIFEST}"
        raise MissingDataError(
            f"The data of Search-QA were not found: {where}. Import them with trial-ray data search-qa --corpus FILE "
            f"--questions FILE, or choose a split of generated worlds: {', '.join(GENERATED)}."
        )
    return open_index(folder, Corpus)


@lru_cache(MAX_OPEN)
def open_world(name: str, num_passages: int, concise: bool, num_questions: int, families: Sequence[str]) -> Corpus:
    """Open the corpus of a generated world, which is generated on first use and stored in the cache.

    Args:
        name: name of the world; its first word is the split of the questions.
        num_passages: see :class:`~trial_envs.search_qa.world.World`.
        concise: see :class:`~trial_envs.search_qa.world.World`.
        num_questions: number of questions.
        families: kinds of the questions, from :data:`~trial_envs.search_qa.world.FAMILIES`.
    """
    origin = {"generator": VERSION, "world": [name, num_passages, concise, num_questions, *families]}
    folder = cache_folder() / f"search-qa-{content_key(origin)}"
    if not (folder / MANIFEST).is_file():
        world = World(name, num_passages, concise)
        write_corpus(folder, world.passages(), {name.split()[0]: world.questions(num_questions, families)}, origin)
    return open_index(folder, Corpus)

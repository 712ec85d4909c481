"""The questions of an environment's split: of imported data, or of generated worlds in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from trial_envs.core.cache import cache_folder
from trial_envs.errors import MissingDataError
from trial_envs.search_qa.corpus import Corpus, Question, open_corpus, write_corpus
from trial_envs.search_qa.world import VERSION, World
from trial_envs.webshop.catalogue import MANIFEST
from trial_envs.webshop.preparation import content_key

DATA_VARIABLE = "SEARCH_QA_DATA"
IMPORTED = "search-qa"
"""Name of the imported corpus in the cache, which environments use if no folder is given."""
GENERATED = ("generated", "generated_valid", "generated_test")
"""Splits of generated worlds; no world is in two of them."""
MAX_OPEN = 256
"""Maximum number of open worlds: each maps its files into memory."""


class QuestionSet(Sequence[tuple[Corpus, Question]]):
    """Questions with their corpora, which are opened when they are needed.

    With ``N`` corpora, question ``n`` of the set is question ``n // N`` of corpus ``n % N``.

    Args:
        openers: functions that open the corpora.
        split: split of the questions in each corpus.
        num_questions: total number of questions.
    """

    def __init__(self, openers: Sequence[Callable[[], Corpus]], split: str, num_questions: int) -> None:
        self._num_corpora, self._split, self._num_questions = len(openers), split, num_questions
        self._open = lru_cache(MAX_OPEN)(lambda number: openers[number]())

    def __len__(self) -> int:
        return self._num_questions

    def __getitem__(self, number: int) -> tuple[Corpus, Question]:  # type: ignore[override]
        position, chosen = divmod(number, self._num_corpora)
        corpus = self._open(chosen)
        return corpus, corpus.question(self._split, position)


def find_data(data: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder given by argument or variable, else the imported corpus, else ``None``."""
    chosen = data or os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    imported = cache_folder() / IMPORTED
    return imported if (imported / MANIFEST).is_file() else None


def open_data(data: str | os.PathLike[str] | None) -> Corpus:
    """Open the imported corpus in a folder; ``None`` selects ``SEARCH_QA_DATA``, then the imported corpus.

    Raises:
        MissingDataError: the folder has no imported corpus.
        CorruptCatalogueError: its content is damaged.
    """
    folder = find_data(data)
    if folder is None or not (folder / MANIFEST).is_file():
        where = "no folder was given, and nothing was imported" if folder is None else f"{folder} has no {MANIFEST}"
        raise MissingDataError(
            f"The data of Search-QA were not found: {where}. Import them with trial-ray data search-qa --corpus FILE "
            f"--questions FILE, or choose a split of generated worlds: {', '.join(GENERATED)}."
        )
    return open_corpus(folder)


def open_questions(
    split: str,
    data: str | os.PathLike[str] | None,
    concise: bool,
    seed: int,
    num_questions: int,
    num_passages: int,
    num_worlds: int,
) -> QuestionSet:
    """Return the questions of a split.

    Args:
        split: one of :data:`GENERATED`, or a split of imported data.
        data: folder of imported data; see :func:`open_data`. The other arguments are for generated worlds.
        concise: see :class:`~trial_envs.search_qa.world.World`.
        seed: seed of the worlds.
        num_questions: total number of questions of the worlds.
        num_passages: number of passages of each world.
        num_worlds: maximum number of worlds; there is never more than one world per question.

    Raises:
        UnknownSplitError: the data have no such split.
        MissingDataError, CorruptCatalogueError: see :func:`open_data`.
    """
    if split not in GENERATED:
        corpus = open_data(data)
        return QuestionSet([lambda: corpus], split, corpus.num_questions(split))
    count = min(num_worlds, num_questions)

    def open_world(number: int) -> Corpus:
        """Open the corpus of a world, which is generated on first use and stored in the cache."""
        name, share = f"{split} {seed} {number}", -(-(num_questions - number) // count)
        origin = {"generator": VERSION, "world": [name, num_passages, concise], "questions": share}
        folder = cache_folder() / f"search-qa-{content_key(origin)}"
        if not (folder / MANIFEST).is_file():
            world = World(name, num_passages, concise)
            write_corpus(folder, world.passages(), {split: world.questions(share)}, origin)
        return open_corpus(folder)

    return QuestionSet([partial(open_world, number) for number in range(count)], split, num_questions)

"""Import of a corpus and of questions: converts local files to the index folder that environments read."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trial_envs.core.cache import cache_folder
from trial_envs.core.extras import install_command
from trial_envs.errors import CorruptCatalogueError, MissingDataError, MissingPackageError
from trial_envs.search_qa.corpus import IMPORTED, read_passage, write_corpus
from trial_envs.search_qa.world import Passage, Question

REPORTED = 10_000
"""Number of entries between two reports of progress."""
TAKEN = "taken"
"""Key of the number of imported entries in a file's counts; the other keys are reasons for which entries were dropped."""


def import_data(
    corpus: Path | None,
    questions: Sequence[Path],
    target: Path | None = None,
    report: Callable[[Path, int], None] = lambda file, number: None,
) -> tuple[Path, dict[Path, Counter[str]]]:
    """Index a corpus and questions, without a download. Entries that cannot be used are dropped and counted.

    Args:
        corpus: file of JSON lines, which may be gzip-compressed; each line is an object with ``contents``, a text whose first
            line is the title. ``None`` if the passages are on a server.
        questions: files of questions, Parquet or JSON lines, with ``question``, ``golden_answers`` (a text or a list of texts)
            and ``data_source``. The name of a file up to its first dot is the split, such as ``train``; files of the same
            split are read one after the other.
        target: index folder, which is replaced; default: the imported corpus in the user's cache.
        report: called with a file and the number of its entries read so far, after every :data:`REPORTED` entries.

    Returns:
        The index folder, and for each file its counts: the number of imported entries, with the key :data:`TAKEN`, and the
        number of dropped entries by reason.

    Raises:
        MissingDataError: a file is missing.
        CorruptCatalogueError: a file cannot be read, or has no usable entry.
        MissingPackageError: PyArrow is not installed, and there are Parquet files.
        FileExistsError: the folder to replace is not an index.
    """
    counts: dict[Path, Counter[str]] = {}

    def read(file: Path, convert: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        counted = counts[file] = Counter()
        for number, entry in enumerate(_read_entries(file), start=1):
            item = convert(entry) if isinstance(entry, dict) else "not a JSON object"
            dropped = isinstance(item, str)
            counted[item if dropped else TAKEN] += 1
            if not dropped:
                yield item
            if number % REPORTED == 0:
                report(file, number)
        if not counted[TAKEN]:
            raise CorruptCatalogueError(f"{file} has no usable entry: {dict(counted) or 'the file is empty'}.")

    splits: dict[str, list[Iterator[Question]]] = {}
    for file in questions:
        splits.setdefault(file.name.partition(".")[0], []).append(read(file, _read_question))
    chained = {split: chain(*files) for split, files in splits.items()}
    passages = read(corpus, _read_contents) if corpus else ()
    origin = {"files": [file.name for file in (corpus, *questions) if file]}
    return write_corpus(target or cache_folder() / IMPORTED, passages, chained, origin, replace=True), counts


def _read_entries(file: Path) -> Iterator[Any]:
    """Yield the rows of a Parquet file, or the values of a file of JSON lines, with ``None`` for a line that is not JSON."""
    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(file) as parquet:
                for batch in parquet.iter_batches():
                    yield from batch.to_pylist()
            return
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None
    except FileNotFoundError as error:
        raise MissingDataError(f"{file} does not exist.") from error
    except (OSError, ValueError, EOFError) as error:
        raise CorruptCatalogueError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    except ImportError as error:
        raise MissingPackageError(f"PyArrow is not installed: {install_command('search-qa')}") from error


def _read_contents(entry: dict[str, Any]) -> Passage | str:
    """Return the passage of an entry, or the reason why the entry is dropped."""
    contents = entry.get("contents")
    return read_passage(contents) if isinstance(contents, str) and contents.strip() else "contents is not a text"


def _read_question(entry: dict[str, Any]) -> Question | str:
    """Return the question of an entry, or the reason why the entry is dropped."""
    text, answers, family = (entry.get(field) for field in ("question", "golden_answers", "data_source"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(text, str) or not text.strip():
        return "question is not a text"
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        return "golden_answers is not a list of texts"
    return Question(text.strip(), tuple(answers), family if isinstance(family, str) else "")

"""ALFWorld's official games in packed form: a file ``games_all.jsonl.xz``, and two files with their common domain and grammar.

The ``xz`` file has 217 MB of text and no random access, so the first use writes the games, compressed one by one, to an
SQLite file in the user's cache. Later uses and other processes read single games from the SQLite file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from trial_envs.alfworld.engine import GameText
from trial_envs.alfworld.families import family_of
from trial_envs.alfworld.game import Game
from trial_envs.core.cache import cache_folder
from trial_envs.errors import CorruptGameError, MissingDataError, UnknownTaskError

PACKED_FILE = "games_all.jsonl.xz"
_DOMAIN_FILE = "domain.pddl"
_GRAMMAR_FILE = "grammar.twl2.tmpl"
_TASK_MARK = '"@@TASK@@"'

_SCHEMA = "CREATE TABLE games (split TEXT, task TEXT, game BLOB, PRIMARY KEY (split, task)) WITHOUT ROWID"


class PackedGames:
    """ALFWorld's official games in one compressed file, ``games_all.jsonl.xz``.

    Raises:
        MissingDataError: the file of the domain or of the grammar is missing.
        CorruptGameError: the packed file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in (_DOMAIN_FILE, _GRAMMAR_FILE):
            if not (folder / name).is_file():
                raise MissingDataError(f"{folder} has {PACKED_FILE} but not {name}; copy the whole packed release.")
        self._domain = (folder / _DOMAIN_FILE).read_text(encoding="utf-8")
        self._grammar = (folder / _GRAMMAR_FILE).read_text(encoding="utf-8")
        self._index = _index_of(folder / PACKED_FILE)

    def tasks(self, split: str) -> Sequence[str]:
        """Return the task ids of a split, sorted."""
        return _indexed_tasks(self._index, split)

    def game(self, split: str, task_id: str) -> Game:
        """Read one game.

        Raises:
            UnknownTaskError: the split has no such game.
        """
        with _reading(self._index) as connection:
            row = connection.execute(
                "SELECT game FROM games WHERE split = ? AND task = CAST(? AS TEXT)",
                (split, task_id.encode("utf-8", "replace")),
            ).fetchone()
        if row is None:
            raise UnknownTaskError(f"The split {split!r} of {self._folder} has no game {task_id!r:.200}.")
        try:
            content = json.loads(zlib.decompress(row[0]))
            walkthrough = tuple(content["walkthrough"])
            grammar = self._grammar.replace(_TASK_MARK, json.dumps(content["task"]))
            text = GameText(self._domain, content["pddl_problem"], grammar)
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise _damaged(self._index, error) from error
        return Game(task_id, family_of(task_id), text, walkthrough)


@lru_cache(maxsize=16)
def _indexed_tasks(index: Path, split: str) -> tuple[str, ...]:
    with _reading(index) as connection:
        rows = connection.execute("SELECT task FROM games WHERE split = ? ORDER BY task", (split,)).fetchall()
    return tuple(task for (task,) in rows)


@contextlib.contextmanager
def _reading(index: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection and close it after the ``with`` block; SQLite's own context manager would not close it."""
    try:
        with contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        if not index.is_file():
            raise MissingDataError(
                f"The index of the packed games, {index}, was deleted; make a new environment."
            ) from error
        raise _damaged(index, error) from error


def _damaged(index: Path, error: Exception) -> CorruptGameError:
    reason = f"{type(error).__name__}: {error}"
    return CorruptGameError(
        f"The index of the packed games, {index}, is damaged ({reason}); delete it, and it is rebuilt."
    )


def _index_of(packed: Path) -> Path:
    """Return the SQLite file with the games of a packed file; write it if the cache does not have it."""
    state = packed.stat()
    version = f"{_SCHEMA} {packed.resolve()} {state.st_size} {state.st_mtime_ns}"
    key = hashlib.sha256(version.encode()).hexdigest()[:16]
    index = cache_folder() / f"alfworld-{key}.sqlite"
    if not index.is_file():
        _write_index(packed, index)
    return index


def _write_index(packed: Path, index: Path) -> None:
    """Write the SQLite file under a temporary name and rename it, so that no process reads an incomplete file."""
    handle, temporary = tempfile.mkstemp(dir=index.parent, prefix=f"{index.stem}-", suffix=".part")
    os.close(handle)
    try:
        connection = sqlite3.connect(temporary)
        try:
            connection.execute(_SCHEMA)
            connection.executemany("INSERT INTO games VALUES (?, ?, ?)", _index_entries(packed))
            connection.commit()
        finally:
            connection.close()
        os.replace(temporary, index)
    except BaseException:
        os.unlink(temporary)
        raise


def _index_entries(packed: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the split, the task id and the compressed game of every line of the packed file."""
    try:
        with lzma.open(packed, "rt", encoding="utf-8") as stream:
            for line in stream:
                game = json.loads(line)
                kept = {key: game[key] for key in ("name", "task", "walkthrough", "pddl_problem")}
                yield game["split"], f"{game['name']}/{game['trial']}", zlib.compress(json.dumps(kept).encode(), 1)
    except (lzma.LZMAError, EOFError, ValueError, KeyError) as error:
        raise CorruptGameError(f"{packed} is not a packed ALFWorld release: {type(error).__name__}: {error}") from error

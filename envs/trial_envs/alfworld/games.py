"""The sources of ALFWorld games: official games in a directory tree or in one compressed file, and the generator.

All sources list task ids without reading games, and read a game only when it is played.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from trial_envs.alfworld import generator
from trial_envs.alfworld.engine import GameText
from trial_envs.alfworld.families import family_of, parse_name
from trial_envs.alfworld.game import Game
from trial_envs.alfworld.packed import PACKED_FILE, PackedGames
from trial_envs.core.levels import require_whole
from trial_envs.errors import CorruptGameError, MissingDataError, UnknownSplitError, UnknownTaskError

OFFICIAL_SPLITS = ("train", "valid_seen", "valid_unseen", "valid_train")
GENERATED = "generated"
SPLITS = (*OFFICIAL_SPLITS, GENERATED)

DATA_VARIABLE = "ALFWORLD_DATA"
DEFAULT_FOLDER = Path("~/.cache/alfworld")
"""Default folder of ALFWorld's official games, into which ``alfworld-download`` writes them."""
_TREE = "json_2.1.1"
_GAME_FILE = "game.tw-pddl"

_HELP = (
    f"Download the games with alfworld-download, or set {DATA_VARIABLE} (or the argument data) to a folder with "
    f"{_TREE}/<split>/ or {PACKED_FILE}, or play generated games with split='generated'."
)


class GameSource(Protocol):
    """A source of ALFWorld games."""

    def tasks(self, split: str) -> Sequence[str]:
        """Return the task ids of a split, in a fixed order."""

    def game(self, split: str, task_id: str) -> Game:
        """Return one game."""


class GeneratedGames:
    """Generated games: ``num_games`` ids of one seed are listed, and every well-formed id can be played."""

    def __init__(self, difficulty: str, num_games: int, seed: int, families: Sequence[str] | None) -> None:
        require_whole(1, num_games=num_games)
        self._tasks = generator.task_ids(difficulty, seed, num_games, families)

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of the ``num_games`` listed games."""
        return self._tasks

    def game(self, split: str, task_id: str) -> Game:
        """Generate the game of a task id."""
        return generator.generate(task_id)


class TreeGames:
    """ALFWorld's official games in their directory layout, ``<split>/<name>/<trial>/game.tw-pddl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def tasks(self, split: str) -> Sequence[str]:
        """Return the ids of the solvable games of ALFWorld's six task families.

        Raises:
            MissingDataError: the folder has no such split.
        """
        folder = self._folder / split
        if not folder.is_dir():
            raise MissingDataError(f"{self._folder} has no split {split!r}: {folder} is missing. {_HELP}")
        state = folder.stat()
        return _tree_tasks(folder, state.st_ino, state.st_mtime_ns)

    def game(self, split: str, task_id: str) -> Game:
        """Read one game.

        Raises:
            UnknownTaskError: the split has no such game.
            CorruptGameError: the file is not a game.
            MissingDataError: the file was removed or cannot be read.
        """
        if task_id not in self.tasks(split):
            raise UnknownTaskError(f"{self._folder / split} has no game {task_id!r:.200}.")
        path = self._folder / split / task_id / _GAME_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MissingDataError(f"{path} was listed before but cannot be read now: {error}. {_HELP}") from error
        except (ValueError, RecursionError) as error:
            raise CorruptGameError(f"{path} is not a JSON file: {error}") from error
        return _published_game(task_id, content, path)


def _published_game(task_id: str, content: object, path: Path) -> Game:
    keys = ("pddl_domain", "pddl_problem", "grammar")
    fields = content if isinstance(content, dict) else {}
    missing = [key for key in keys if not isinstance(fields.get(key), str)]
    if missing:
        raise CorruptGameError(f"{path} lacks {', '.join(missing)}; expected a game of alfworld >= 0.4.0.")
    text = GameText(fields["pddl_domain"], fields["pddl_problem"], fields["grammar"])
    walkthrough = fields.get("walkthrough") or ()
    if not isinstance(walkthrough, list | tuple) or not all(isinstance(command, str) for command in walkthrough):
        raise CorruptGameError(f"{path} has the walkthrough {walkthrough!r:.200}, expected a list of commands.")
    return Game(task_id, family_of(task_id), text, tuple(walkthrough))


@lru_cache(maxsize=16)
def _tree_tasks(folder: Path, inode: int, changed_ns: int) -> tuple[str, ...]:
    """Return the task ids in a split's folder; ``inode`` and ``changed_ns`` are only cache keys: a changed folder is read again."""
    tasks = []
    for name in sorted(os.listdir(folder)):
        if parse_name(name) is None or not (folder / name).is_dir():
            continue
        for trial in sorted(os.listdir(folder / name)):
            path = folder / name / trial / _GAME_FILE
            if path.is_file() and _solvable(path):
                tasks.append(f"{name}/{trial}")
    return tuple(tasks)


def _solvable(path: Path) -> bool:
    """Return ``False`` if the game file's field ``solvable``, which is in its last 4,096 bytes, is false, else ``True``."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4096))
        return b'"solvable": false' not in stream.read()


def find_data(data: str | os.PathLike[str] | None) -> Path | None:
    """Return ``data``, else the folder that ``ALFWORLD_DATA`` names, else the default folder if it has games, else ``None``."""
    if data:
        return Path(data).expanduser()
    default = DEFAULT_FOLDER.expanduser()
    # On import, the package alfworld sets ALFWORLD_DATA to the default folder, even if the folder has no games.
    variable = Path(os.environ.get(DATA_VARIABLE) or default).expanduser()
    if variable != default:
        return variable
    holds_games = (default / PACKED_FILE).is_file() or any(
        (default / tree).is_dir() for tree in (_TREE, *OFFICIAL_SPLITS)
    )
    return default if holds_games else None


def open_official(data: str | os.PathLike[str] | None) -> GameSource:
    """Open ALFWorld's official games in the folder ``data``; ``None`` selects ``ALFWORLD_DATA``, else ``~/.cache/alfworld``.

    Raises:
        MissingDataError: the folder does not exist or has no games.
    """
    default = DEFAULT_FOLDER.expanduser()
    folder = Path(data or os.environ.get(DATA_VARIABLE) or default).expanduser()
    # The package alfworld may have set ALFWORLD_DATA to the default folder, so the error does not name the variable.
    origin = "the argument data" if data else "the default folder" if folder == default else DATA_VARIABLE
    if not folder.is_dir():
        raise MissingDataError(f"ALFWorld's games were not found: {folder} ({origin}) is not a folder. {_HELP}")
    if (folder / PACKED_FILE).is_file():
        return PackedGames(folder)
    for tree in (folder / _TREE, folder):
        if any((tree / split).is_dir() for split in OFFICIAL_SPLITS):
            return TreeGames(tree)
    raise MissingDataError(f"ALFWorld's games were not found: {folder} ({origin}) has no games. {_HELP}")


def check_split(split: str) -> str:
    """Check the name of a split and return it.

    Raises:
        UnknownSplitError: ALFWorld has no such split.
    """
    if split not in SPLITS:
        raise UnknownSplitError(f"ALFWorld has no split {split!r}; expected one of {', '.join(SPLITS)}.")
    return split

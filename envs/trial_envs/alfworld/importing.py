"""Import of ALFWorld's official games: checks a local copy by digest and copies it to the default folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trial_envs.alfworld.game import Game
from trial_envs.alfworld.games import DEFAULT_FOLDER, OFFICIAL_SPLITS, GameSource, TreeGames, open_official
from trial_envs.errors import CorruptGameError, MissingDataError

ORIGIN = (
    "The games come from the ALFWorld authors: alfworld-download, a command of the package alfworld, fetches them "
    "(release json_2.1.1, 4,027 text games, about 340 MB unpacked)."
)

KNOWN_DIGESTS = {
    "train": (3553, "4ec0cbfaaecee1df045de287db438a1ae9a702659752f715072698f1787bf129"),
    "valid_seen": (140, "2c2dc2554f4fc606c74e91ae7dca2299cc2daee791b5416c621423d264c0c5ee"),
    "valid_unseen": (134, "e4ecf6578cb19e5247022d965b7752d9412aa335e73eef09518171091d3ca394"),
    "valid_train": (200, "810ad395260ae17b19f41c1c3aebc3fdacb7c049daa2ed02b5af6908d1df699c"),
}
"""Split -> number of its games in ALFWorld's official release, and SHA-256 over the ids and contents of these games."""


@dataclass(frozen=True, slots=True)
class SplitState:
    """The comparison of one split in a folder with ALFWorld's official release.

    Attributes:
        split: name of the split.
        found: number of games in the folder.
        expected: number of games in the release.
        intact: whether the games are equal to the games of the release.
    """

    split: str
    found: int
    expected: int
    intact: bool


def inspect_games(folder: str | Path, on_game: Callable[[], None] = lambda: None) -> list[SplitState]:
    """Read the games of a folder's official splits and compare them with ALFWorld's official release.

    Args:
        folder: the release as a directory tree or packed.
        on_game: called after each game is read.

    Raises:
        MissingDataError: the folder does not exist or has no games.
        CorruptGameError: a file is not a game.
    """
    source = open_official(folder)
    return [_inspect_split(source, split, on_game) for split in OFFICIAL_SPLITS]


def import_games(
    folder: str | Path, target: str | Path | None = None, on_game: Callable[[], None] = lambda: None
) -> Path:
    """Copy ALFWorld's official release, if it is intact, to the folder that ``ALFWorldEnv`` reads by default.

    The release may lack whole splits. The copy is written under a temporary name and renamed at the end, so it is never
    incomplete.

    Args:
        folder: the release as a directory tree or packed.
        target: a new or empty folder; default ``~/.cache/alfworld``.
        on_game: called after each game is read.

    Returns:
        The folder of the copy, which is also valid as the argument ``data`` and as ``ALFWORLD_DATA``.

    Raises:
        MissingDataError: the folder does not exist or has no games.
        CorruptGameError: a split differs from the release.
        CorruptGameError: a link in the folder points outside the folder, so other files would be copied.
        FileExistsError: the target is a file, or a folder that is not empty.
    """
    destination = Path(target or DEFAULT_FOLDER).expanduser()
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is not an empty folder; remove it, or choose another folder.")
    states = inspect_games(folder, on_game)
    if not any(state.found for state in states):
        raise MissingDataError(f"{folder} has no official game. {ORIGIN}")
    for state in states:
        if state.found and not state.intact:
            raise CorruptGameError(
                f"The split {state.split!r} of {folder} differs from the release: {state.found} games, expected "
                f"{state.expected}, or other contents. Download it again. {ORIGIN}"
            )
    if link := _link_outwards(Path(folder).expanduser()):
        raise CorruptGameError(f"{link} is a link out of {folder}; remove it, or replace it with its target. {ORIGIN}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as work:
        copy = shutil.copytree(Path(folder).expanduser(), Path(work) / "copy")
        if destination.exists():
            destination.rmdir()
        copy.rename(destination)
    return destination


def _link_outwards(folder: Path) -> Path | None:
    """Return a link in the folder that points outside it; ``None`` if there is none."""
    root = folder.resolve()
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return next((path for path in links if not path.resolve().is_relative_to(root)), None)


def _inspect_split(source: GameSource, split: str, on_game: Callable[[], None]) -> SplitState:
    expected, known = KNOWN_DIGESTS[split]
    try:
        tasks = source.tasks(split)
    except MissingDataError:
        if not isinstance(source, TreeGames):
            raise
        tasks = ()
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task} {game_digest(source.game(split, task))}\n".encode())
        on_game()
    return SplitState(split, len(tasks), expected, digest.hexdigest() == known)


def game_digest(game: Game) -> str:
    """Return the SHA-256 of a game as JSON with sorted keys and the fields that ALFWorld's official game files have."""
    published = {
        "pddl_domain": game.text.domain,
        "grammar": game.text.grammar,
        "pddl_problem": game.text.problem,
        "solvable": True,
        "walkthrough": list(game.walkthrough),
    }
    return hashlib.sha256(json.dumps(published, sort_keys=True).encode()).hexdigest()

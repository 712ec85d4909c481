"""Base class for environments of other libraries. A task id is a game's name and a seed; a split is a range of seeds."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from trial_envs.core import Outcome, TextEnv
from trial_envs.core.extras import install_command
from trial_envs.core.levels import require_whole
from trial_envs.errors import (
    GeneratorSettingError,
    MissingEngineError,
    UnknownSplitError,
    UnknownTaskError,
)
from trial_envs.imports.random_state import RandomState

MAX_GAMES = 1_000_000
"""Maximum number of games of a split. The splits' first seeds are this far apart, so no two splits share a game."""
FIRST_SEEDS = {"train": 0, "valid": MAX_GAMES, "test": 2 * MAX_GAMES}
"""Split -> seed of its first game."""

_SEED = re.compile(r"0|[1-9][0-9]{0,8}")


class SeededEnv(TextEnv):
    """Games of another library that are made from seeds; a game is a pure function of its task id ``<name>/<seed>``.

    A subclass implements :meth:`_begin`, :meth:`_play` and :meth:`_free`. During :meth:`_begin` and :meth:`_play`, the global
    random generators have states that belong to this environment.

    Args:
        name: name of the game or data set in the library.
        split: ``train``, ``valid`` or ``test``; their games have different seeds.
        num_games: number of games that ``tasks()`` lists, at most a million.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        actions: list for ``info["admissible_actions"]`` in every turn, because the library lists no actions.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`.
    """

    keeps_case = True

    def __init__(
        self, name: str, split: str, num_games: int, max_turns: int, actions: Sequence[str], render_mode: str | None
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        require_whole(1, num_games=num_games)
        if num_games > MAX_GAMES:
            raise GeneratorSettingError(f"Expected num_games of at most {MAX_GAMES}, got {num_games}.")
        if isinstance(actions, str) or not all(isinstance(action, str) for action in actions):
            raise GeneratorSettingError(f"Expected actions as a list of str, got {actions!r:.200}.")
        self._name, self._num_games = name, num_games
        self._listed = tuple(actions)
        self._random = RandomState()
        self.tasks()  # Raises UnknownSplitError if the split is unknown.

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own), by ascending seed."""
        first = FIRST_SEEDS.get(split or self.split)
        if first is None:
            raise UnknownSplitError(
                f"{self._name} has no split {split or self.split!r}; expected one of {[*FIRST_SEEDS]}."
            )
        return [f"{self._name}/{first + number}" for number in range(self._num_games)]

    def family(self, task_id: str) -> str:
        """Return the name of the game or data set."""
        return task_id.rpartition("/")[0]

    @abstractmethod
    def _begin(self, seed: int) -> tuple[str, Outcome]:
        """Start the game with this seed; return its instruction and the first outcome."""

    @abstractmethod
    def _play(self, action: str) -> Outcome:
        """Carry out one action."""

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        name, _, seed = task_id.rpartition("/")
        if name != self._name or not _SEED.fullmatch(seed):
            raise UnknownTaskError(
                f"Unknown task {task_id!r:.200}; expected {self._name}/<seed> with a seed below 10⁹."
            )
        with self._random.active(int(seed)):
            return self._begin(int(seed))

    def _advance(self, action: str) -> Outcome:
        with self._random.active():
            return self._play(action)


def import_library(module: str, extra: str) -> ModuleType:
    """Import another library's module.

    Raises:
        MissingEngineError: the module, or a package that it needs, is not installed; the message has the install command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingEngineError(f"{module} cannot be imported ({error}): {install_command(extra)}") from error


def plain_settings(name: str, settings: Mapping[str, Any] | None, reserved: Sequence[str] = ()) -> dict[str, Any]:
    """Check keyword arguments for the library and return them as a dict.

    Args:
        name: name of the setting, for the error message.
        settings: the keyword arguments, or ``None`` if there are none.
        reserved: keyword arguments that are not allowed, because the task id determines them.

    Raises:
        GeneratorSettingError: ``settings`` is not a dict with names as keys, or has a reserved key.
    """
    arguments = {} if settings is None else settings
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise GeneratorSettingError(f"Expected {name} as a dict of keyword arguments, got {settings!r:.200}.")
    if conflicts := [key for key in reserved if key in arguments]:
        raise GeneratorSettingError(f"{name} sets {', '.join(conflicts)}, which the task id decides; leave it out.")
    return dict(arguments)

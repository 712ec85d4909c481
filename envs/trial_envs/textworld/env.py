"""``trial/TextWorld-v0``: games generated, compiled and played by TextWorld, as a Gymnasium environment."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

from trial_envs.core import Outcome, TextEnv
from trial_envs.core.extras import install_command
from trial_envs.core.forks import ProcessFolder, fork_safe_lock
from trial_envs.core.levels import require_whole
from trial_envs.errors import (
    CorruptGameError,
    GeneratorSettingError,
    MissingEngineError,
    UnknownSplitError,
    UnknownTaskError,
)

LEVELS = {"coin_collector": 300, "treasure_hunter": 30}
"""Highest level of each family of games; the lowest is 1."""
MAX_GAMES = 1_000_000
"""Maximum number of games of a split. The splits' first seeds are this far apart, so no two splits share a game."""
FIRST_SEEDS = {"train": 0, "test": MAX_GAMES}
"""Seed of the first game of each split."""


_NOT_UNDERSTOOD = "That's not a verb I recognise."
_BANNER_END = "$$ \n"
_TASK_ID = re.compile(rf"({'|'.join(LEVELS)})-([1-9][0-9]{{0,2}})-(0|[1-9][0-9]{{0,8}})")
_WANTED = ("feedback", "admissible_commands", "policy_commands", "objective", "score", "max_score", "won", "lost")
_MAKING = fork_safe_lock()
"""Lock that is held while a game is made or closed. TextWorld's game maker is not thread-safe. Closing a game unloads a shared
library; if the process forked while a thread did so, the child would wait forever when it loads a library."""


class GameState(Protocol):
    """The fields of ``textworld.GameState`` that are requested with :data:`_WANTED`."""

    feedback: str
    admissible_commands: list[str]
    policy_commands: list[str]
    objective: str
    score: int
    max_score: int
    won: bool
    lost: bool


class Game(Protocol):
    """The methods of ``textworld.Environment`` that :class:`TextWorldEnv` calls."""

    def reset(self) -> GameState:
        """Start the game."""

    def step(self, command: str) -> tuple[GameState, float, bool]:
        """Carry out one command."""

    def close(self) -> None:
        """End the game and free its Z-machine interpreter."""


class TextWorldEnv(TextEnv):
    """The agent must find a coin in a maze (``coin_collector``) or the right one of two objects (``treasure_hunter``).

    A game is a pure function of its task id ``<family>-<level>-<seed>``. Making a game takes about a second. The action that
    wins gets a reward of 1.0; taking the wrong object ends the episode without a reward. Only admissible commands
    are passed to the game, because its parser would also accept ``quit``, several sentences, or saving to a file. For
    every other string the observation is the game's own text for an unknown verb.

    Args:
        split: ``train`` or ``test``; their games have different seeds.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        level: difficulty of the games that ``tasks()`` lists; see the two challenges in TextWorld's documentation.
        num_games: number of games that ``tasks()`` lists, at most a million.
        families: families of games, which alternate in ``tasks()``.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError, MissingEngineError: see :mod:`trial_envs.errors`.
    """

    keeps_case = True

    def __init__(
        self,
        split: str = "train",
        max_turns: int = 50,
        level: int = 5,
        num_games: int = 256,
        families: Sequence[str] = tuple(LEVELS),
        render_mode: str | None = None,
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        self._level, self._num_games, self._families = level, num_games, tuple(families)
        require_whole(1, level=level, num_games=num_games)
        unknown = [family for family in self._families if family not in LEVELS]
        if unknown or not self._families or num_games > MAX_GAMES:
            raise GeneratorSettingError(
                f"Expected families of {list(LEVELS)} and num_games of at most {MAX_GAMES}, got {families!r} and {num_games}."
            )
        highest = min(LEVELS[family] for family in self._families)
        if not 1 <= level <= highest:
            raise GeneratorSettingError(
                f"Expected a level from 1 to {highest} for {', '.join(self._families)}, got {level}."
            )
        self.tasks()  # This call raises UnknownSplitError if the split is unknown.
        self._textworld = _import("textworld")
        self._folder = ProcessFolder()
        self._game: Game | None = None
        self._loaded: tuple[Path, str] | None = None
        self.walkthrough: tuple[str, ...] = ()
        """Commands that win the current game; empty before the first ``reset``."""

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own), by ascending seed."""
        first = FIRST_SEEDS.get(split or self.split)
        if first is None:
            raise UnknownSplitError(
                f"TextWorld has no split {split or self.split!r}; expected one of {[*FIRST_SEEDS]}."
            )
        count = len(self._families)
        return [f"{self._families[n % count]}-{self._level}-{first + n}" for n in range(self._num_games)]

    def family(self, task_id: str) -> str:
        """Return ``coin_collector`` or ``treasure_hunter``."""
        return task_id.partition("-")[0]

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        game_key = (self._folder.path(), task_id)  # A forked process has its own folder, so it makes the game again.
        if self._loaded != game_key:
            self._loaded, self.walkthrough = None, ()
            self._load(*game_key)
            self._loaded = game_key
        assert self._game is not None
        self._state = self._game.reset()
        self.walkthrough = tuple(self._state.policy_commands)
        return self._state.objective, self._outcome(self._state.feedback.rpartition(_BANNER_END)[2])

    def _advance(self, action: str) -> Outcome:
        command = action.strip()
        if command not in self._state.admissible_commands:
            return self._outcome(_NOT_UNDERSTOOD, understood=False)
        assert self._game is not None
        self._state, _, _ = self._game.step(command)
        return self._outcome(self._state.feedback)

    def _free(self) -> None:
        self._close_game()
        self._folder.remove()

    def _close_game(self) -> None:
        with _MAKING:
            if self._game is not None:
                self._game.close()
                self._game = None  # This unloads the shared library of the game's interpreter, so it needs the lock.

    def _outcome(self, text: str, *, understood: bool = True) -> Outcome:
        state = self._state
        prompt = text.rfind("\n>")  # In TextWorld's output, the prompt and the status line follow the feedback.
        return Outcome(
            observation=re.sub(r"\n{3,}", "\n\n", text[:prompt] if prompt >= 0 else text).strip(),
            admissible_actions=tuple(state.admissible_commands),
            reward=float(state.won),
            score=state.score / state.max_score,
            won=state.won,
            done=state.won or state.lost,
            invalid_action=not understood,
        )

    def _load(self, folder: Path, task_id: str) -> None:
        """Make the game of a task id and start a Z-machine interpreter for it; an interpreter can play only one game."""
        match = _TASK_ID.fullmatch(task_id)
        if match is None or int(match[2]) > LEVELS[match[1]]:
            raise UnknownTaskError(
                f"Unknown task {task_id!r:.200}; expected <family>-<level>-<seed> with a level up to {LEVELS}."
            )
        self._close_game()
        challenge = _import(f"textworld.challenges.tw_{match[1]}.{match[1]}")
        options = self._textworld.GameOptions()
        options.seeds, options.path = int(match[3]), str(folder / "game.z8")
        options.force_recompile = True
        infos = self._textworld.EnvInfos(**dict.fromkeys(_WANTED, True))
        with _MAKING, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is not fully supported")  # TextWorld warns about every generated game.
            game = challenge.make({"level": int(match[2])}, options)
            try:
                path = self._textworld.generator.compile_game(game, options)
            except (OSError, RuntimeError) as error:
                raise CorruptGameError(f"TextWorld cannot make {task_id!r}: {type(error).__name__}: {error}") from error
            self._game = self._textworld.start(path, infos)


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingEngineError(f"TextWorld is not installed: {install_command('textworld')}") from error

"""``trial/ALFWorld-v0``: ALFWorld as a Gymnasium environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trial_envs.alfworld import games
from trial_envs.alfworld.engine import AlfredEngine, EngineState
from trial_envs.alfworld.families import TASK_PREFIX, family_of
from trial_envs.alfworld.game import Game
from trial_envs.core import Outcome, TextEnv
from trial_envs.errors import ClosedEnvError


class ALFWorldEnv(TextEnv):
    """ALFWorld's household text games.

    Observations are the engine's feedback texts; the first one ends with the task's instruction. The action that wins gets a
    reward of 1.0. ``info["admissible_actions"]`` is sorted and includes ``help``. After an action that is not in this list, the
    observation is ``Nothing happens.`` and ``invalid_action`` is true.

    Args:
        split: ``train``, ``valid_seen``, ``valid_unseen``, ``valid_train`` or ``generated``; default ``train`` if ``data``
            or ``ALFWORLD_DATA`` is set or ``~/.cache/alfworld`` has games, else ``generated``.
        data: folder of ALFWorld's official games, as a directory tree or packed (:mod:`trial_envs.alfworld.packed`); default
            ``ALFWORLD_DATA``, then ``~/.cache/alfworld``.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        difficulty: level of the generated games: ``tiny``, ``small``, ``medium`` or ``official``.
        num_games: number of generated games that ``tasks("generated")`` lists.
        generator_seed: seed of the generated games.
        families: families of the generated tasks, which alternate; default: the level's families.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError, MissingDataError, MissingEngineError: see :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        split: str | None = None,
        data: str | os.PathLike[str] | None = None,
        max_turns: int = 50,
        difficulty: str = "small",
        num_games: int = 256,
        generator_seed: int = 0,
        families: Sequence[str] | None = None,
        render_mode: str | None = None,
    ) -> None:
        chosen = games.check_split(split or ("train" if games.find_data(data) else games.GENERATED))
        super().__init__(chosen, max_turns, render_mode)
        self._data = data
        self._generated = games.GeneratedGames(difficulty, num_games, generator_seed, families)
        self._official: games.GameSource | None = None
        if chosen != games.GENERATED:
            self._source(chosen).tasks(chosen)  # If the data are missing, this raises an error before the first reset.
        self._engine = AlfredEngine()
        self._game: Game | None = None

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """Commands that win the current game; empty before the first ``reset``."""
        return self._game.walkthrough if self._game else ()

    def commands_to_win(self) -> int | None:
        """Return the length of a plan that wins from the current state; ``None`` if the planner finds none.

        The plan may use objects that the agent has not seen yet.

        Raises:
            ClosedEnvError: the environment was closed, or not reset yet.
        """
        if self._game is None:
            raise ClosedEnvError("No game is running; call reset() first.")
        return self._engine.commands_to_win()

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own).

        The ids of ALFWorld's official games are sorted; those of generated games are in the order of their indices.
        """
        chosen = games.check_split(split or self.split)
        return self._source(chosen).tasks(chosen)

    def family(self, task_id: str) -> str:
        """Return the family of a task, one of the six families of ALFWorld."""
        return family_of(task_id)

    def _source(self, split: str) -> games.GameSource:
        if split == games.GENERATED:
            return self._generated
        if self._official is None:
            self._official = games.open_official(self._data)
        return self._official

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        if self._game is None or self._game.task_id != task_id:
            game = self._source(self.split).game(self.split, task_id)
            self._game = None
            self._engine.load(game.text)
            self._game = game
        outcome = _outcome(self._engine.reset())
        return self._engine.task_sentence.removeprefix(TASK_PREFIX), outcome

    def _advance(self, action: str) -> Outcome:
        return _outcome(self._engine.step(action))

    def _free(self) -> None:
        self._engine.close()


def _outcome(state: EngineState) -> Outcome:
    return Outcome(
        observation=state.feedback,
        admissible_actions=state.admissible_commands,
        reward=float(state.won),
        score=float(state.won),
        won=state.won,
        done=state.won,
        invalid_action=not state.understood,
    )

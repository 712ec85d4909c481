"""``trial/GEM-v0``: environments of GEM (the package ``gem-llm``), as a Gymnasium environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trial_envs.core import Outcome
from trial_envs.errors import GeneratorSettingError, MissingDataError
from trial_envs.imports.seeded_env import SeededEnv, import_library, plain_settings


class GEMEnv(SeededEnv):
    """An environment of GEM, such as ``game:GuessTheNumber-v0-easy``.

    GEM's first observation becomes the task. Observations end with GEM's ``info["suffix"]``, the current state, except
    when GEM ends the episode. Rewards are GEM's; ``won`` means a last reward of at least 1, and the score is the return, clipped
    to [0, 1]. GEM reports an action in the wrong format only by a negative reward, which sets ``invalid_action``.

    Args:
        game: id in GEM's registry.
        game_args: keyword arguments of the environment's class, in place of the registered arguments.
        split: ``train``, ``valid`` or ``test``; their games have different seeds.
        num_games: number of games that ``tasks()`` lists, at most a million.
        max_turns: maximum number of actions per episode; the episode is then truncated. GEM may end it earlier.
        actions: list for ``info["admissible_actions"]`` in every turn, because GEM lists no actions.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        MissingEngineError, UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        game: str = "game:GuessTheNumber-v0-easy",
        game_args: Mapping[str, Any] | None = None,
        split: str = "train",
        num_games: int = 4096,
        max_turns: int = 50,
        actions: Sequence[str] = (),
        render_mode: str | None = None,
    ) -> None:
        super().__init__(game, split, num_games, max_turns, actions, render_mode)
        self._game_args = plain_settings("game_args", game_args)
        with _preserve_logging():
            self._registration = import_library("gem.envs.registration", "gem")
            import_library("gem.envs", "gem")
        if game not in self._registration.ENV_REGISTRY:
            raise GeneratorSettingError(f"GEM has no environment {game!r}; gem.print_envs() lists them.")

    def _begin(self, seed: int) -> tuple[str, Outcome]:
        self._game = self._make()
        self._return = 0.0
        task, info = self._game.reset(seed=seed)
        task = task.strip()
        return task, Outcome(str(info.get("suffix", "")).strip() or task, self._listed)

    def _play(self, action: str) -> Outcome:
        shown, reward, terminated, truncated, info = self._game.step(action)
        reward, done = float(reward), bool(terminated or truncated)
        self._return += reward
        parts = [shown] if done else [shown, str(info.get("suffix", ""))]
        return Outcome(
            observation="\n".join(part.strip() for part in parts if part.strip()),
            admissible_actions=self._listed,
            reward=reward,
            score=min(1.0, max(0.0, self._return)),
            won=done and reward >= 1,
            done=done,
            invalid_action=reward < 0,
        )

    def _free(self) -> None:
        """Do nothing: a game has no resources except memory."""

    def _make(self) -> Any:
        """Return a new GEM environment, because a used one that has a data set may continue with the next row of the data set."""
        try:
            return self._registration.make(self._name, **self._game_args)
        except LookupError as error:
            if "NLTK" not in str(error):
                raise
            raise MissingDataError(
                f"{self._name} needs data of NLTK that are not installed; on a machine with network run python -m "
                "nltk.downloader words"
            ) from error
        except (ImportError, TypeError, ValueError, AssertionError) as error:
            raise GeneratorSettingError(
                f"GEM cannot make {self._name} with {self._game_args}: {type(error).__name__}: {error}"
            ) from error


@contextmanager
def _preserve_logging() -> Iterator[None]:
    """Restore the root logger's handlers and level after the ``with`` block, because importing GEM changes both."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

"""``trial/TextArena-v0``: single-player games of TextArena, as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trial_envs.core import Outcome
from trial_envs.errors import GeneratorSettingError, MissingDataError
from trial_envs.imports.seeded_env import SeededEnv, import_library, plain_settings


class TextArenaEnv(SeededEnv):
    """A single-player game of TextArena, such as ``GuessTheNumber-v0`` or ``FrozenLake-v0``.

    The game's prompt is the task, and the game's text after an action is the observation. If a game shows only its prompt at
    first, the prompt is also the first observation. The last action gets the game's reward, which is in most games the share of
    the task that was completed; ``won`` means a reward of at least 1. Actions without brackets are put into brackets if
    TextArena's own wrapper of the game does so.

    Args:
        game: id in TextArena's registry.
        game_args: keyword arguments of the game's class, in place of the registered arguments.
        split: ``train``, ``valid`` or ``test``; their games have different seeds.
        num_games: number of games that ``tasks()`` lists, at most a million.
        max_turns: maximum number of actions per episode; the episode is then truncated. The game may end it earlier.
        actions: list for ``info["admissible_actions"]`` in every turn, because TextArena lists no actions.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        MissingEngineError, UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        game: str = "GuessTheNumber-v0",
        game_args: Mapping[str, Any] | None = None,
        split: str = "train",
        num_games: int = 4096,
        max_turns: int = 50,
        actions: Sequence[str] = (),
        render_mode: str | None = None,
    ) -> None:
        super().__init__(game, split, num_games, max_turns, actions, render_mode)
        self._arena = import_library("textarena", "textarena")
        self._game_args = plain_settings("game_args", game_args)
        registry = import_library("textarena.envs.registration", "textarena").ENV_REGISTRY
        if game not in registry:
            raise GeneratorSettingError(
                f"TextArena has no game {game!r}; expected an id of textarena.envs.registration."
            )

    def _begin(self, seed: int) -> tuple[str, Outcome]:
        self._game = self._make()
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise self._several_players() from error
        self._state = self._game.state
        if not isinstance(self._state, self._arena.SinglePlayerState):
            raise self._several_players()
        prompt = self._arena.ObservationType.PROMPT
        messages = self._messages()
        task = "\n".join(text for _, text, kind in messages if kind == prompt).strip()
        shown = self._join(message for message in messages if message[2] != prompt)
        return task, Outcome(shown or task, self._listed)

    def _play(self, action: str) -> Outcome:
        done, _ = self._game.step(action=action)
        shown = self._join(self._messages())
        info = self._state.game_info[0]
        reward, reason = self._end() if done else (0.0, "")
        shown = f"{shown}\n{reason}".strip()
        return Outcome(
            observation=shown,
            admissible_actions=self._listed,
            reward=reward,
            score=min(1.0, max(0.0, reward)),
            won=reward >= 1,
            done=done,
            invalid_action=self._state.error_count > 0 or bool(info["invalid_move"]),
        )

    def _end(self) -> tuple[float, str]:
        """Return the reward of an ended episode, and the reason why it ended."""
        reward, reason = (self._state.rewards or {}).get(0, 0.0), self._state.game_info[0].get("reason") or ""
        # Countdown, Cryptarithm, Slitherlink and ThreeCardMonte (TextArena 0.7.4) swap reward and reason after an invalid move.
        return (0.0, f"{reason} {reward}") if isinstance(reward, str) else (float(reward), str(reason))

    def _free(self) -> None:
        """Do nothing: a game has no resources except memory."""

    def _make(self) -> Any:
        """Return a new game without its observation wrappers, which repeat all earlier messages."""
        try:
            game = self._arena.make(self._name, **self._game_args)
        except LookupError as error:
            if "NLTK" not in str(error):
                raise
            raise MissingDataError(
                f"{self._name} needs data of NLTK that are not installed; on a machine with network run python -m "
                "nltk.downloader words averaged_perceptron_tagger_eng"
            ) from error
        except (ImportError, SyntaxError, TypeError, ValueError, AssertionError, FileNotFoundError) as error:
            raise GeneratorSettingError(
                f"TextArena cannot make {self._name} with {self._game_args}: {type(error).__name__}: {error}"
            ) from error
        return self._unwrapped(game)

    def _unwrapped(self, game: Any) -> Any:
        if isinstance(game, self._arena.ObservationWrapper):
            return self._unwrapped(game.env)
        if isinstance(game, self._arena.Wrapper):
            game.env = self._unwrapped(game.env)
        return game

    def _messages(self) -> list[tuple[int, str, Any]]:
        """Return the game's messages since the last call, without the player's own actions.

        Some games of TextArena 0.7.4 pass arguments in the wrong order when they record the player's action. The recorded
        message then has a number in place of the text, and is dropped.
        """
        action = self._arena.ObservationType.PLAYER_ACTION
        messages = self._game.get_observation()[1]
        return [message for message in messages if message[2] != action and isinstance(message[1], str)]

    @staticmethod
    def _join(messages: Any) -> str:
        return "\n".join(text.strip() for _, text, _ in messages).strip()

    def _several_players(self) -> GeneratorSettingError:
        return GeneratorSettingError(f"{self._name} is a game for several players, expected a game for one")

"""TextArena's games of one player: what the trainer knows of ``trial/TextArena-v0``."""

from __future__ import annotations

from collections.abc import Sequence

from trial_envs.external.number_search import NumberSearch
from trial_ray.environments.adapter import Demonstrator, EnvironmentAdapter, RandomPlay, WarmStartSpec
from trial_ray.environments.templates import TaggedTemplate

ROLE = "You are an agent who plays a text game by yourself, one move at a time."


class GamePlayer:
    """Halves the range where the game asks for a number; in every other game it draws one of the actions on offer.

    Args:
        form: how the game wants a number to be written, with ``{}`` in its place.
    """

    def __init__(self, form: str = "[{}]") -> None:
        self._search = NumberSearch(form)
        self._player: Demonstrator = self._search

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._player = self._search if self._search.plays(task) else RandomPlay()
        self._player.reset(task, observation, seed)

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose an action.

        Raises:
            ConfigError: the game asks for no number, and the environment lists no ``actions``.
        """
        return self._player.act(observation, admissible)

    def carried_out(self, action: str) -> None:
        """Learn that ``action`` was carried out."""
        self._player.carried_out(action)


ADAPTER = EnvironmentAdapter(
    env_id="trial/TextArena-v0",
    title="TextArena",
    templates={"tagged": TaggedTemplate(ROLE, keep_case=True)},
    warm_start=WarmStartSpec(demonstrator=GamePlayer),
)

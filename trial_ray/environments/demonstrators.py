"""Players that the warm start clones: they see no more than the policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from trial_ray.errors import ConfigError


class Demonstrator(Protocol):
    """A player that sees no more than the policy."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose an action; one of the admissible ones where the environment lists them."""

    def carried_out(self, action: str) -> None:
        """Learn that ``action`` was carried out, which may be another one than it chose."""


@runtime_checkable
class Planner(Demonstrator, Protocol):
    """A demonstrator that can say between which actions it draws."""

    def options(self, observation: str, admissible: Sequence[str]) -> Sequence[str]:
        """The actions between which ``act`` draws, called next or in its place; at least one."""


def plan(demonstrator: Demonstrator, observation: str, admissible: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What a demonstrator does now, and all that it might as well have done: its options, if it tells them."""
    as_good = demonstrator.options(observation, admissible) if isinstance(demonstrator, Planner) else ()
    action = demonstrator.act(observation, admissible)
    return action, as_good or (action,)


class RandomPlay:
    """Draws one of the actions on offer: it shows the form of actions, not which of them help."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._random = random.Random(seed)

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Draw an action.

        Raises:
            ConfigError: the environment lists no actions.
        """
        if not admissible:
            raise ConfigError(
                "The environment lists no admissible_actions to draw from; give its adapter a demonstrator to clone."
            )
        return self._random.choice(list(admissible))

    def carried_out(self, action: str) -> None:
        """Nothing is remembered."""

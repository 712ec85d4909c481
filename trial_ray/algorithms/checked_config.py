"""Base of the configurations: settings that refuse unknown names and values out of range."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided

from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self


class CheckedConfig(AlgorithmConfig):
    """An RLlib config whose ``validate`` names a key that it does not know."""

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: a key is unknown or a value is out of range; the message names it and what is expected.
        """
        super().validate()
        # RLlib itself adds "class" when it builds an algorithm, and Tune its "__stdout_file__" and the like.
        known = {*vars(type(self)()), "class"}
        for name in vars(self):
            if name not in known and not name.startswith("__"):
                self._refuse(name, known)

    def _refuse(self, name: str, known: set[str]) -> None:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{type(self).__name__} has no setting {name!r}.{hint}")

    def _assign(self, **values: Any) -> Self:
        for name, value in values.items():
            if value is not NotProvided:
                setattr(self, name, value)
        return self

    def _require_at_least(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not value >= minimum:
                raise ConfigError(f"{name} is {value}, expected at least {minimum}.")

    def _require_above(self, minimum: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not value > minimum:
                raise ConfigError(f"{name} is {value}, expected a value above {minimum}.")

    def _require_within(self, minimum: float, maximum: float, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not minimum <= value <= maximum:
                raise ConfigError(f"{name} is {value}, expected a value in [{minimum}, {maximum}].")

    def _require_one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}.")

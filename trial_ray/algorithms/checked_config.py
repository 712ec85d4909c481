"""Base of the configurations: RLlib's config, whose settings are checked and whose class travels with its dict form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from trial_ray.errors import ConfigError
from trial_ray.settings import check_settings, did_you_mean

if TYPE_CHECKING:
    from typing import Self

CONFIG_CLASS = "config_class"


class CheckedConfig(AlgorithmConfig):
    """An RLlib config whose ``validate`` names unknown settings and values out of range.

    RLlib and Tune pass configs on as dicts, and rebuild them as the algorithm's default config, updated from the dict. Several
    methods share an algorithm, so the dict names the config's class, and the update returns an instance of that class.
    """

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, plain(value))

    def validate(self) -> None:
        """Check every value.

        Raises:
            ConfigError: a key is unknown or a value is out of range; the message names it and what is expected.
        """
        try:
            super().validate()
        except (KeyError, TypeError, AttributeError) as error:  # RLlib does not look at the types of its own settings
            raise ConfigError(f"RLlib cannot use one of its settings ({type(error).__name__}: {error}).") from error
        # RLlib itself adds "class" when it builds an algorithm, and Tune its "__stdout_file__" and the like.
        known = {*vars(type(self)()), "class"}
        for name in vars(self):
            if name not in known and not name.startswith("__"):
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, known)}")
        check_settings(self)

    def to_dict(self) -> dict[str, Any]:
        """RLlib's dict of all settings, and the config's class."""
        return {**super().to_dict(), CONFIG_CLASS: type(self)}

    def update_from_dict(self, config_dict: Any) -> Self:
        """Take over settings; a dict made by :meth:`to_dict` of a derived class gives a new config of that class.

        Args:
            config_dict: a dict, or a config.

        Raises:
            ConfigError: the dict was made by a config of another kind, which this one's algorithm does not train.
        """
        settings = dict(config_dict.items())
        wanted = settings.pop(CONFIG_CLASS, type(self))
        if wanted is type(self):
            super().update_from_dict(settings)
            return self
        if not issubclass(wanted, type(self)):
            raise ConfigError(
                f"Settings of a {wanted.__name__} cannot make a {type(self).__name__}; build the algorithm with "
                "config.build_algo(), or give Tune config.algo_class."
            )
        made: Self = wanted()
        return made.update_from_dict(settings)


def plain(value: Any) -> Any:
    """The value with Python's numbers in place of NumPy's, which records and experiment files have no form for."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain(inner) for key, inner in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

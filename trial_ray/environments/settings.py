"""Settings of what is played: one environment or a mixture, and their panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.entry import EnvironmentEntry, make_entries
from trial_ray.errors import ConfigError
from trial_ray.settings import RLlibSettings

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec


class EnvironmentSettings(RLlibSettings):
    """Part of a config: ``env`` and ``env_config`` are RLlib's, the panel's settings those of the evaluation.

    Attributes:
        environments: id, keyword arguments and weight of each environment of a mixture; empty: ``env`` alone is played.
        adapters: the user's.
        env_specs: what Gymnasium knew in the driver under each id.
    """

    environments: tuple[tuple[str, dict[str, Any], float], ...]
    adapters: tuple[EnvironmentAdapter, ...]
    env_specs: dict[str, EnvSpec]
    panel_split: str | dict[str, str] | None
    panel_env_config: dict[str, Any]

    def environment_entries(self) -> tuple[EnvironmentEntry, ...]:
        """What is played, one entry an environment.

        Raises:
            ConfigError: nothing is registered under an id, or an adapter belongs to none of the environments.
        """
        return make_entries(self.played_environments(), self.adapters, self.env_specs)

    def adapter_of(self, name: str) -> EnvironmentAdapter:
        """The adapter of the environment that trajectories name; with a single environment that one, whatever they name.

        Raises:
            KeyError: the run plays several environments, and none of that name.
        """
        adapters = {entry.name: entry.adapter for entry in self.environment_entries()}
        return next(iter(adapters.values())) if len(adapters) == 1 else adapters[name]

    def panel_entries(self) -> tuple[EnvironmentEntry, ...]:
        """What the panels are played in, one entry an environment; empty where no panel is configured.

        Raises:
            ConfigError: as :meth:`environment_entries`, or the panel names an environment that the run does not play.
        """
        entries = self.environment_entries()
        split, changes = self.panel_split, self.panel_env_config
        if split is None:
            return ()
        if len(entries) == 1 and not isinstance(split, dict):
            return (entries[0].at(**changes, split=split),)
        names = [entry.name for entry in entries]
        splits = split if isinstance(split, dict) else dict.fromkeys(names, split)
        for setting, found in (("split", splits), ("env_config", changes)):
            if unknown := sorted(set(found) - set(names)):
                raise ConfigError(
                    f"The panel's {setting} names {', '.join(map(repr, unknown))}, expected environments of the run: "
                    f"{', '.join(map(repr, names))}."
                )
        return tuple(
            entry.at(**changes.get(entry.name, {}), split=splits[entry.name])
            for entry in entries
            if entry.name in splits
        )

    def played_environments(self) -> tuple[tuple[str, dict[str, Any], float], ...]:
        """Id, keyword arguments and weight of every environment; empty where none was chosen."""
        if self.env is None:
            return ()
        return self.environments or ((self.env, dict(self.env_config), 1.0),)

"""Configuration of what is played: one environment or a mixture, and what the trainer knows of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import NotProvided

from trial_ray.algorithms.checked_config import CheckedConfig, plain
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.entry import find_adapter, find_spec, travelling
from trial_ray.environments.settings import EnvironmentSettings
from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

    from gymnasium.envs.registration import EnvSpec


class EnvironmentConfig(EnvironmentSettings, CheckedConfig):
    """``.environment()``: RLlib's section, with adapters and mixtures."""

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.environments: tuple[tuple[str, dict[str, Any], float], ...] = ()
        self.adapters: tuple[EnvironmentAdapter, ...] = ()
        self.env_specs: dict[str, EnvSpec] = {}

    def environment(
        self,
        env: str | None = NotProvided,
        *,
        env_config: dict[str, Any] = NotProvided,
        environments: Sequence[tuple[str, Mapping[str, Any], float]] = NotProvided,
        adapter: EnvironmentAdapter | Iterable[EnvironmentAdapter] | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Choose what is played.

        Settings that the adapter has ``defaults`` for, and that still have the config's own default, take the adapter's.

        Args:
            env: id of an environment that is registered with Gymnasium. Whatever was registered here, in the driver, is known
                to every actor.
            env_config: its keyword arguments, and the split of its tasks under ``"split"`` (default ``"train"``).
            environments: several environments in place of one: ``(id, keyword arguments, weight)`` each. Tasks are drawn in
                proportion to the weights.
            adapter: what the trainer knows of the environment, see :class:`~trial_ray.environments.EnvironmentAdapter`; several
                for a mixture. ``None``: this package's adapters, and default values for other environments.
            kwargs: RLlib's further settings of the section.

        Raises:
            ConfigError: an adapter is none.
        """
        before = self._adapter_defaults()
        if environments is not NotProvided and environments:
            self.environments = tuple(_environment(each) for each in environments)
            env, env_config = self.environments[0][:2]
        elif env is not NotProvided:
            self.environments = ()
        if adapter is not NotProvided:
            self.adapters = _adapters(adapter)
        if env is not NotProvided:
            kwargs["env"] = env
        if env_config is not NotProvided:
            kwargs["env_config"] = plain(env_config)  # RLlib updates the setting in place
        super().environment(**kwargs)
        own = vars(type(self)())
        for name, value in before.items():
            if getattr(self, name) == value:
                setattr(self, name, own[name])  # the environment before had set it
        for env_id, _, _ in self.played_environments():
            self._remember(env_id)
        return self

    def _adapter_defaults(self) -> dict[str, Any]:
        """Settings that the adapters of the environments chosen so far have defaults for."""
        specs = [self.env_specs[env_id] for env_id, _, _ in self.played_environments() if env_id in self.env_specs]
        return {name: value for spec in specs for name, value in find_adapter(spec.id, self.adapters).defaults.items()}

    def _remember(self, env_id: str) -> None:
        """Keep what Gymnasium knows under an id here, for actors in which it is not registered; take the adapter's defaults."""
        if env_id not in self.env_specs:
            try:
                self.env_specs = {**self.env_specs, env_id: find_spec(env_id)}
            except ConfigError:
                return  # it may be registered later; validate() looks again
        own = vars(type(self)())
        for name, value in find_adapter(self.env_specs[env_id].id, self.adapters).defaults.items():
            if name not in own:
                raise ConfigError(
                    f"The adapter of {env_id} has a default for {name!r}, which is no setting of a config."
                )
            if getattr(self, name) == own[name]:
                setattr(self, name, value)

    def check_environments(self) -> None:
        """Refuse environments, weights and adapters that cannot be used.

        Raises:
            ConfigError: names the environment, what was found and what is expected.
        """
        if self.environments and [self.env, self.env_config] != list(self.environments[0][:2]):
            raise ConfigError(
                "env or env_config was changed, but the run plays several environments, each with keyword arguments of its own: "
                "change .environment(environments=...)."
            )
        for env_id, _, weight in self.played_environments():
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
                raise ConfigError(f"The weight of {env_id} is {weight!r}, expected a number above 0.")
            # Once more: of a file that is still running, nobody knows which modules beside it must travel by value.
            known = self.env_specs.get(env_id)
            spec = find_spec(env_id) if known is None else travelling(known)
            if spec is not known:
                self.env_specs = {**self.env_specs, env_id: spec}
        for adapter in self.adapters:
            adapter.check()
        for entry in self.environment_entries():
            if self.privileged_view == "skill" and entry.adapter.skills is None:
                raise ConfigError(
                    f"{entry.env_id} offers no 'skill' view: its adapter has no skills. Give the advice with "
                    'EnvironmentAdapter(skills={family: text, "": general text}), or choose another privileged_view.'
                )


def _environment(each: Any) -> tuple[str, dict[str, Any], float]:
    if not isinstance(each, list | tuple) or len(each) != 3 or not isinstance(each[1], Mapping):
        raise ConfigError(f"environments holds {each!r:.200}, expected (id, keyword arguments, weight).")
    return each[0], dict(each[1]), each[2]


def _adapters(adapter: Any) -> tuple[EnvironmentAdapter, ...]:
    adapters = () if adapter is None else (adapter,) if isinstance(adapter, EnvironmentAdapter) else tuple(adapter)
    for each in adapters:
        if not isinstance(each, EnvironmentAdapter):
            raise ConfigError(f"adapter is {each!r:.200}, expected an EnvironmentAdapter.")
    return adapters

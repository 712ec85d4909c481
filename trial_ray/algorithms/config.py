"""Configuration of the algorithms: RLlib's config with checked settings, and the settings that all methods share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from gymnasium.envs.registration import EnvSpec
from ray.rllib.algorithms.algorithm_config import NotProvided

from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import find_adapter, find_spec, picklable_spec
from trial_ray.algorithms.rllib_settings import BuildCalls, check_values, refuse_uncalled, refuse_unread
from trial_ray.config.declare import check_settings, did_you_mean, is_search, set_defaults
from trial_ray.config.training import check_reward
from trial_ray.errors import ConfigError, TrialRayError, refusing
from trial_ray.learner.method import Method
from trial_ray.secrets import refuse_plain_secrets

if TYPE_CHECKING:
    from trial_ray.config.keywords import Sections
else:

    class Sections:
        """Signatures of methods such as ``training()``, for type checkers; at run time :class:`RunSettings` has them."""


CONFIG_CLASS = "config_class"
NAMED_CONFIG = "named_config"
"""Key in a Tune trial's config. Its value is a pair of the trial's name and the dict of a whole config, so a grid can contain
several methods."""
MAX_SEED = 2**32 - 2_000_000
"""Largest seed: NumPy accepts seeds below 2**32, and RLlib adds to it an env runner's index and, in evaluations, a million."""


@refusing({"validate_train_batch_size_vs_rollout_fragment_length": "neither has an effect here"})
class TextAlgorithmConfig(Sections, BuildCalls):
    """RLlib's config with the checked settings that all methods share.

    Every setting that is not RLlib's is a field of one of the base classes, and a config method such as ``training()`` sets it.
    Most defaults are the values of the TRIAL paper's published runs. ``tuned_examples/paper_alfworld.py`` sets the paper's
    values; its ``reward_scale`` and ``hindsight_start_iteration`` differ from the defaults.

    RLlib and Tune pass configs as dicts, and rebuild a config by updating the algorithm's default config from the dict. Several
    methods share an algorithm, so the dict contains the config's class, and the update returns an instance of that class.
    """

    method_class: ClassVar[type[Method[Any]]] = Method

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class)
        self.environments: tuple[tuple[str, dict[str, Any], float], ...] = ()
        self.adapters: tuple[EnvironmentAdapter, ...] = ()
        self.env_specs: dict[str, EnvSpec] = {}
        self._set_rllib_defaults()
        set_defaults(self)

    def __setattr__(self, key: str, value: Any) -> None:
        super().__setattr__(key, plain(value))
        if key == "environments" and value and isinstance(value, list | tuple):
            with contextlib.suppress(ConfigError):  # validate() raises the error later.
                env, env_config, _ = _environment(value[0])
                super().__setattr__("env", env)
                super().__setattr__("env_config", env_config)

    def _set_rllib_defaults(self) -> None:
        """Set the defaults that differ from RLlib's, with the reasons as comments."""
        from trial_ray.rollout.env_runner import TextEnvRunner

        self.env_runner_cls = TextEnvRunner
        self.lr = 1e-6
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        # The driver needs no environment: env-runner actors step the environments.
        self.create_local_env_runner = False
        # RLlib's default connectors expect RLlib's episodes, but learners get groups of trajectories.
        self.add_default_connectors_to_learner_pipeline = False
        # Env runners have no learned state that could be merged or broadcast.
        self.merge_env_runner_states = False
        self.broadcast_env_runner_states = False
        self._dont_auto_sync_env_runner_states = True
        # RLlib's default of 60 s would silently drop slow rollouts.
        self.sample_timeout_s = 3600.0
        self.restart_failed_env_runners = True
        self.delay_between_env_runner_restarts_s = 1.0
        self.log_sys_usage = False

    def environment(
        self,
        env: str | None = NotProvided,
        *,
        env_config: dict[str, Any] = NotProvided,
        environments: Sequence[tuple[str, Mapping[str, Any], float]] = NotProvided,
        adapter: EnvironmentAdapter | Iterable[EnvironmentAdapter] | None = NotProvided,
        **kwargs: Any,
    ) -> Self:
        """Select the environment, or several environments.

        A setting that has an entry in the adapter's ``defaults``, and still has the config's default value, takes the adapter's
        value.

        Args:
            env: id of an environment that is registered with Gymnasium. An environment that was registered here, in the driver,
                is available to every actor.
            env_config: keyword arguments of the environment, and the split of its tasks under ``"split"`` (default ``"train"``).
            environments: several environments instead of one, each as ``(id, keyword arguments, weight)``. Tasks are drawn in
                proportion to the weights; an environment of weight 0 is only evaluated.
            adapter: description of the environment for the trainer, see :class:`~trial_ray.adapters.EnvironmentAdapter`;
                several for a mixture. ``None`` selects this package's adapters, and default values for other environments.
            kwargs: further settings of RLlib's ``environment()``.

        Raises:
            ConfigError: an adapter is not an ``EnvironmentAdapter``.
        """
        before = self._adapter_defaults()
        if environments is not NotProvided and environments:
            self.environments = tuple(_environment(environment) for environment in environments)
            env, env_config = self.environments[0][:2]
        elif env is not NotProvided:
            if self.environments:
                self.env_config = {}
            self.environments = ()
        if adapter is not NotProvided:
            self.adapters = _adapters(adapter)
        # plain() copies the dict, since RLlib updates it in place.
        super().environment(env, env_config=plain(env_config), **kwargs)
        for env_id, _, _ in self.played_environments():
            if env_id not in self.env_specs:
                with contextlib.suppress(ConfigError):  # The id may be registered later; validate() tries again.
                    # Keep the spec for actors, where the environment is not registered.
                    self.env_specs = {**self.env_specs, env_id: find_spec(env_id)}
        own, after = vars(type(self)()), self._adapter_defaults()
        for name in before.keys() | after.keys():
            if getattr(self, name) in (own[name], before.get(name, own[name])):
                setattr(self, name, after.get(name, own[name]))
        return self

    def _adapter_defaults(self) -> dict[str, Any]:
        """Return the adapters' defaults for settings; the first selected environment whose adapter has a default decides."""
        own, defaults = vars(type(self)()), dict[str, Any]()
        for env_id, _, _ in self.played_environments():
            if env_id not in self.env_specs:
                continue
            for name, value in find_adapter(self.env_specs[env_id].id, self.adapters).defaults.items():
                if name not in own:
                    raise ConfigError(
                        f"The adapter of {env_id} has a default for {name!r}, which is not a setting of a config."
                    )
                defaults.setdefault(name, value)
        return defaults

    # -- checks ----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: a key is unknown or a value is out of range; the message contains the setting and the expected value.
        """
        refuse_unread(self)
        check_values(self)
        try:
            super().validate()
        except TrialRayError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            # RLlib does not check the types of most settings.
            raise ConfigError(f"RLlib cannot use one of its settings ({type(error).__name__}: {error}).") from error
        # RLlib adds the attribute "class" to the config, and Tune adds attributes such as "__stdout_file__".
        known = {*vars(type(self)()), "class"}
        for name in vars(self):
            if name not in known and not name.startswith("__"):
                raise ConfigError(f"{type(self).__name__} has no setting {name!r}.{did_you_mean(name, known)}")
        check_settings(self)
        self.check_secrets()
        self.check_policy()
        self.check_sampling()
        self.check_evaluation()
        self.check_engines()
        self.check_update()
        check_reward(self.reward, self.reward_weights)
        self.check_teacher()
        self._check_rllib()
        self.check_environments()

    def check_secrets(self) -> None:
        """Reject secrets that are given as values instead of references to environment variables.

        Raises:
            ConfigError: there is such a secret; the message names the setting.
        """
        for name in ("env_config", "evaluation_env_config", "environments", "engine_kwargs", "warm_start"):
            refuse_plain_secrets(name, getattr(self, name, None))

    def _check_rllib(self) -> None:
        """Check RLlib's settings that this package's settings replace or restrict."""
        from trial_ray.learner.connectors import require_connectors
        from trial_ray.learner.learner import GRPOLearner
        from trial_ray.models.module import CausalLMModule
        from trial_ray.rollout.env_runner import TextEnvRunner

        is_open = self.seed is None or is_search(self.seed)  # The seed may be a search space.
        if not is_open and not (type(self.seed) is int and 0 <= self.seed <= MAX_SEED):
            raise ConfigError(
                f"seed is {self.seed!r}, expected an int of at least 0 and at most {MAX_SEED}, or None. Set .debugging(seed=0)."
            )
        if self.evaluation_interval and self.evaluation_split is None and not self.in_evaluation:
            raise ConfigError(
                "evaluation_interval is set, but evaluation_split is None, so there is nothing to play. Set "
                ".evaluation(evaluation_split=...), too."
            )
        if self.is_multi_agent:
            raise ConfigError(f"multi_agent() has the policies {sorted(self.policies)}, but one policy is trained.")
        for name, chosen, base in (
            ("env_runner_cls", self.env_runner_cls, TextEnvRunner),
            ("learner_class", self._learner_class or self.get_default_learner_class(), GRPOLearner),
            ("module_class", getattr(self._rl_module_spec, "module_class", None), CausalLMModule),
        ):
            if chosen is None:
                continue
            if not (isinstance(chosen, type) and issubclass(chosen, base)):
                shown = chosen.__name__ if isinstance(chosen, type) else repr(chosen)[:200]
                raise ConfigError(f"{name} is {shown}, expected a class derived from {base.__name__}.")
            refuse_uncalled(name, chosen, base)
        require_connectors(self)
        if self.num_learners > (trajectories := self.tasks_per_iteration * self.group_size):
            raise ConfigError(
                f"num_learners is {self.num_learners}, but an iteration samples at most {trajectories} trajectories "
                "(tasks_per_iteration times group_size); expected at least one for each learner."
            )
        # The copy of the config that RLlib makes for evaluation has no env runners.
        if self.max_staleness and not self.num_env_runners and not self.in_evaluation:
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, but num_env_runners is 0: this process would have to sample and update at "
                "the same time. Set .env_runners(num_env_runners=1) or more."
            )

    def check_environments(self) -> None:
        """Reject environments, mixture weights and environment adapters that cannot be used.

        Raises:
            ConfigError: an environment, a weight or an adapter cannot be used; the message contains the expected value.
        """
        for environment in self.environments:
            _environment(environment)
        if self.environments and [self.env, self.env_config] != list(self.environments[0][:2]):
            raise ConfigError(
                "env or env_config was changed, but the run plays several environments, each with its own keyword arguments: "
                "change .environment(environments=...)."
            )
        for env_id, _, weight in self.played_environments():
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"The weight of {env_id} is {weight!r}, expected a number of at least 0.")
            # Call picklable_spec() again: after the import of a class's module, it replaces the path of the class by the class.
            known = self.env_specs.get(env_id)
            spec = find_spec(env_id) if known is None else picklable_spec(known)
            if spec is not known:
                self.env_specs = {**self.env_specs, env_id: spec}
        for adapter in self.adapters:
            adapter.check()
        entries, evaluated = self.environment_entries(), {entry.name for entry in self.evaluation_entries()}
        if entries and not any(entry.weight for entry in entries):
            raise ConfigError(
                "All environments have weight 0, so there is nothing to train on. Give at least one a weight above 0."
            )
        for entry in entries:
            if not entry.weight and entry.name not in evaluated:
                raise ConfigError(
                    f"{entry.name} has weight 0 and no evaluation set, so it is never played. Name its split in "
                    ".evaluation(evaluation_split=...), or give it a weight above 0."
                )
            if self.teacher_context == "skill" and entry.weight and entry.adapter.skills is None:
                raise ConfigError(
                    f"{entry.env_id} has no 'skill' teacher context: its adapter has no skills. Give the advice with "
                    'EnvironmentAdapter(skills={family: text, "": general text}), or choose another teacher_context.'
                )

    # -- dicts and schedules ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return RLlib's dict of all settings, with the config's class; Tune writes it to files.

        Raises:
            ConfigError: a secret is given as a value instead of a reference to an environment variable.
        """
        self.check_secrets()
        return {**super().to_dict(), CONFIG_CLASS: type(self)}

    def update_from_dict(self, config_dict: Any) -> Self:
        """Update this config from a dict and return it; for a dict of a derived class's config, return a new config of that class.

        Args:
            config_dict: a dict, or a config.

        Raises:
            ConfigError: the dict is from a config class that is not derived from this config's class.
        """
        settings = dict(config_dict.items())
        _, config_settings = settings.pop(NAMED_CONFIG, ("", {}))
        settings = {**config_settings, **settings}
        config_class = settings.pop(CONFIG_CLASS, type(self))
        if config_class is type(self):
            super().update_from_dict(settings)
            return self
        if not issubclass(config_class, type(self)):
            raise ConfigError(
                f"Settings of a {config_class.__name__} cannot make a {type(self).__name__}; build the algorithm with "
                "config.build_algo(), or give Tune config.algo_class."
            )
        config: Self = config_class()
        return config.update_from_dict(settings)

    def schedules(self) -> dict[str, int]:
        """Return the number of iterations that each of the method's schedules takes, by the name of the schedule's setting."""
        return {}

    def unfinished_schedules(self, iterations: float) -> list[str]:
        """Return an error message for each schedule that ``iterations`` would not complete."""
        return [
            f"{name} is {needed}, but training ends after iteration {iterations:g}: the schedule would not be completed. "
            f"Set {name} to at most {iterations:g}, or train longer."
            for name, needed in self.schedules().items()
            if needed > iterations
        ]

    def require_schedules_within(self, iterations: float) -> None:
        """Reject a schedule that is not complete after ``iterations``.

        Raises:
            ConfigError: a schedule needs more than ``iterations``; the message contains both numbers.
        """
        for message in self.unfinished_schedules(iterations):
            raise ConfigError(message)


def plain(value: Any) -> Any:
    """Return the value with Python numbers in place of NumPy numbers, which JSON and experiment files cannot represent."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: plain(inner) for key, inner in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def _environment(entry: Any) -> tuple[str, dict[str, Any], float]:
    if not isinstance(entry, list | tuple) or len(entry) != 3 or not isinstance(entry[1], Mapping):
        raise ConfigError(f"environments has {entry!r:.200}, expected (id, keyword arguments, weight).")
    return entry[0], dict(entry[1]), entry[2]


def _adapters(adapter: Any) -> tuple[EnvironmentAdapter, ...]:
    adapters = () if adapter is None else (adapter,) if isinstance(adapter, EnvironmentAdapter) else tuple(adapter)
    for instance in adapters:
        if not isinstance(instance, EnvironmentAdapter):
            raise ConfigError(f"adapter is {instance!r:.200}, expected an EnvironmentAdapter.")
    return adapters

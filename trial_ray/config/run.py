"""All settings of a run, and the checks across them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar

from trial_ray.config.declare import RLlibSettings
from trial_ray.config.sampling import EngineSettings, PolicySettings, RecordingSettings, RolloutSettings
from trial_ray.config.training import EvaluationSettings, GuardSettings, RecoverySettings, TrainingSettings
from trial_ray.engines.protocol import FLOAT32_GAP, LOW_PRECISION_GAP, is_whole
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.registry import EnvironmentEntry, make_entries
from trial_ray.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

RENAMED_SETTINGS = {
    f"panel_{name}": f"evaluation_{name}"
    for name in ("env_config", "split", "num_tasks", "seed", "temperature", "top_p")
}
"""Settings by the names that they had in earlier versions, which run folders and command lines may hold."""
EARLIER_CHAT_TEMPLATE_KWARGS = {"enable_thinking": False}
"""What earlier versions rendered chat templates with; records of theirs do not say it."""


class Attributes(RLlibSettings):
    """Attributes of a config besides declared settings.

    Attributes:
        method_class: the method's rule; its settings are those that a subclass declares.
        environments: id, keyword arguments and weight of each environment of a mixture; empty: ``env`` alone is played.
        adapters: the user's environment adapters.
        env_specs: what Gymnasium knew in the driver under each id.
    """

    method_class: ClassVar[type[Any]]
    environments: tuple[tuple[str, dict[str, Any], float], ...]
    adapters: tuple[EnvironmentAdapter, ...]
    env_specs: dict[str, EnvSpec]


class RunSettings(
    TrainingSettings,
    PolicySettings,
    RolloutSettings,
    RecordingSettings,
    EngineSettings,
    GuardSettings,
    EvaluationSettings,
    RecoverySettings,
    Attributes,
):
    """All settings of a run, whichever method it trains."""

    # -- what follows from several settings ------------------------------------------------------------------------

    def lora_settings(self) -> dict[str, Any] | None:
        """Arguments of :class:`trial_ray.models.lora.Adapter` that the settings give; ``None`` without adapters."""
        if self.lora_rank is None:
            return None
        return {"rank": self.lora_rank, "alpha": self.lora_alpha, "targets": self.lora_targets, "seed": self.seed or 0}

    def environment_entries(self) -> tuple[EnvironmentEntry, ...]:
        """The environments of the run.

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

    def evaluation_entries(self) -> tuple[EnvironmentEntry, ...]:
        """The environments of the evaluation sets; empty without an evaluation set.

        Raises:
            ConfigError: as :meth:`environment_entries`, or ``evaluation_split`` names an environment that the run does not play.
        """
        entries = self.environment_entries()
        split, changes = self.evaluation_split, self.evaluation_env_config
        if split is None:
            return ()
        if len(entries) == 1 and not isinstance(split, dict):
            return (entries[0].at(**changes, split=split),)
        names = [entry.name for entry in entries]
        splits = split if isinstance(split, dict) else dict.fromkeys(names, split)
        for name, found in (("evaluation_split", splits), ("evaluation_env_config", changes)):
            if unknown := sorted(set(found) - set(names)):
                raise ConfigError(
                    f"{name} names {', '.join(map(repr, unknown))}, expected environments of the run: "
                    f"{', '.join(map(repr, names))}."
                )
        return tuple(
            entry.at(**changes.get(entry.name, {}), split=splits[entry.name])
            for entry in entries
            if entry.name in splits
        )

    def check_weights(self) -> None:
        """Refuse a mixture in which nothing is trained, and an environment of weight 0 that is not evaluated.

        Raises:
            ConfigError: names the environment.
        """
        entries, evaluated = self.environment_entries(), {entry.name for entry in self.evaluation_entries()}
        if entries and not any(entry.weight for entry in entries):
            raise ConfigError("Every environment has weight 0, so that none is trained in; give one a weight above 0.")
        for entry in entries:
            if not entry.weight and entry.name not in evaluated:
                raise ConfigError(
                    f"{entry.name} has weight 0 and no evaluation set, so that it is never played; name its split in "
                    ".evaluation(evaluation_split=...), or give it a weight above 0."
                )

    def played_environments(self) -> tuple[tuple[str, dict[str, Any], float], ...]:
        """Id, keyword arguments and weight of every environment; empty where none was chosen."""
        if self.env is None:
            return ()
        return self.environments or ((self.env, dict(self.env_config), 1.0),)

    def logprob_gap_limit(self) -> float:
        """Largest mean difference between engine and learner at which training goes on, in nats."""
        if self.max_logprob_gap is not None:
            return self.max_logprob_gap
        short = {"bfloat16", "float16"} & {self.passes_dtype(), self.engine_dtype()}
        return LOW_PRECISION_GAP if short else FLOAT32_GAP

    def passes_dtype(self) -> str:
        """Type in which the learner's passes compute: that of autocast, or of the weights where there is none."""
        return self.model_dtype if self._autocast_dtype() == "float32" else self._autocast_dtype()

    def _autocast_dtype(self) -> str:
        return self.compute_dtype or ("bfloat16" if self.num_gpus_per_learner else "float32")

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_policy(self) -> None:
        """Refuse two sources of the first policy, or none, or one that does not fit to the prompts; sharding and adapters where
        there can be none.

        Raises:
            ConfigError: says what was found and what to set.
            MissingDependencyError: adapters need a package that is not installed.
        """
        self.check_chat_template()
        if (self.model_path is None) == (self.warm_start is None):
            raise ConfigError(
                "Choose the policy with exactly one of .rl_module(model_path=...) and .rl_module(warm_start=...)."
            )
        if self.model_dtype == "float64" and self._autocast_dtype() != "float32":
            raise ConfigError(
                "model_dtype is 'float64', which passes in bfloat16 cannot multiply; set .rl_module(compute_dtype='float32'), with "
                "which they compute in float64, or model_dtype='float32'."
            )
        if self.sharding == "fsdp" and self.num_learners < 2:
            raise ConfigError(
                f"sharding='fsdp' spreads the weights over learners, but num_learners is {self.num_learners}; expected at "
                "least 2. Set .learners(num_learners=...), or sharding='none'."
            )
        if self.fsdp_size is not None and (self.sharding == "none" or self.num_learners % self.fsdp_size):
            raise ConfigError(
                f"fsdp_size is {self.fsdp_size} with sharding={self.sharding!r} and num_learners={self.num_learners}; expected a "
                "divisor of num_learners, and sharding='fsdp'. Set fsdp_size to the number of learners on a node, or to None."
            )
        if self.lora_rank is None:
            if self.lora_targets is not None:
                raise ConfigError(
                    "lora_targets is set, but without lora_rank there are no adapters. Set lora_rank too."
                )
        elif importlib.util.find_spec("peft") is None:
            raise MissingDependencyError(
                "lora_rank needs the package peft; install it with: pip install 'trial-ray[lora]'"
            )
        if self.warm_start is not None and self.prompt_style == "conversation":
            raise ConfigError(
                "warm_start clones responses to prompts that stand alone, but prompt_style is 'conversation'. Choose "
                "prompt_style='tagged' or 'plain', or a model that can follow a conversation with .rl_module(model_path=...)."
            )

    def check_engines(self) -> None:
        """Refuse engines whose context is shorter than a prompt and a response, which would refuse the longest prompts.

        Raises:
            ConfigError: says both numbers, or what the engines' own check says.
        """
        super().check_engines()
        context = self.engine_kwargs.get("max_model_len", self.row_tokens())
        if is_whole(context) and context < self.row_tokens():
            raise ConfigError(
                f"engine_kwargs: max_model_len={context} found, at least {self.row_tokens()} expected (max_prompt_tokens "
                "plus max_response_tokens); leave it out, or lower max_prompt_tokens or max_response_tokens."
            )

    def check_view(self) -> None:
        """Refuse a method without the privileged view that it needs, and a teacher without a privileged view.

        Raises:
            ConfigError: says what to set.
        """
        if self.privileged_view is None and self.method_class.needs_privileged_view:
            raise ConfigError(
                f"{type(self).__name__} needs a second view of each turn; set privileged_view, for example to 'outcome'."
            )
        if self.privileged_view is None and self.teacher_sync_iterations is not None:
            raise ConfigError("teacher_sync_iterations is set, but without a privileged_view no teacher is asked.")

    def check_teacher(self) -> None:
        """Refuse a lagged teacher of a policy with adapters.

        Raises:
            ConfigError: names both settings.
        """
        if self.lora_rank is not None and self.teacher_sync_iterations is not None:
            raise ConfigError(
                "teacher_sync_iterations asks for a lagged copy of the policy, which there is none of with adapters "
                f"(lora_rank is {self.lora_rank}). Set teacher_sync_iterations=None, or lora_rank=None."
            )

    def check_overlap(self) -> None:
        """Refuse what sampling while the learner updates cannot do.

        Raises:
            ConfigError: says what to set.
        """
        if self.max_staleness and self.importance_cap is None:
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, so that older weights sample part of the rows, but importance_cap is "
                "None: nothing would correct for it. Set .training(importance_cap=2.0), or max_staleness=0."
            )
        if self.max_staleness and self.max_refills:
            raise ConfigError(
                f"max_refills is {self.max_refills}, expected 0 with max_staleness={self.max_staleness}: an iteration takes the "
                "groups that are finished and does not wait for tasks drawn in place of others."
            )

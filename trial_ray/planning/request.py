"""What a plan is made for: the sizes of a run out of its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trial_ray.config.sampling import fewest_and_most
from trial_ray.engines.arguments import GPU_MEMORY_UTILIZATION, MOST_ROWS, VLLM_CPU_CACHE_GIB, VLLM_CPU_ROWS
from trial_ray.models.model_shape import ModelShape, model_shape
from trial_ray.models.packaged import ALFWORLD_TINY, HUB_NAMES, alfworld_tiny

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Sizes of a run; attributes with the name of a setting have its value.

    Attributes:
        shape: of the policy.
        num_learners: at least 1.
        num_engines, num_env_runners: at least 1; the most that there may be.
        lora_rank: rank of the trained adapters; 0: all weights are trained.
        model_bytes: of a master weight.
        compute_bytes: of a number in the passes.
        num_references: frozen copies of the model beside the policy (reference, stale teacher).
        engine_bytes: of a weight and of a cached number in an engine.
        kv_cache_gib: size of an engine's key-value cache; ``None``: follows from free memory or rows.
        max_batch: most requests that an engine decodes at a time; ``None``: the engine's own limit.
        trajectories: rollouts of an iteration.
    """

    shape: ModelShape
    num_learners: int
    num_gpus_per_learner: float
    sharding: str
    fsdp_size: int | None
    lora_rank: int
    model_bytes: int
    compute_bytes: int
    num_references: int
    gradient_checkpointing: bool
    max_tokens_per_forward: int
    minibatch_rows: int
    prompt_style: str
    privileged_view: str | None
    num_epochs: int
    engine: str
    num_engines: int
    num_gpus_per_engine: float
    tensor_parallel_size: int
    colocate: bool
    engine_bytes: int
    kv_cache_gib: float | None
    gpu_memory_utilization: float
    max_batch: int | None
    max_prompt_tokens: int
    max_response_tokens: int
    num_env_runners: int
    max_episodes_in_flight: int
    trajectories: int
    max_turns: int

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest turn row, which is also the longest request."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def most_rows(self) -> int:
        """Most requests that an engine decodes at a time."""
        return self.max_batch or most_rows(self.engine, self.num_gpus_per_engine)

    @property
    def requests_per_engine(self) -> int:
        """Most requests that an engine has at a time: a rollout asks for one after the other."""
        return math.ceil(self.trajectories / self.num_engines)

    @property
    def shards(self) -> int:
        """Learners that hold one copy of the weights together."""
        return (self.fsdp_size or self.num_learners) if self.sharding == "fsdp" else 1

    @property
    def gpus(self) -> float:
        """GPUs that learners and engines take together."""
        return self.num_learners * self.num_gpus_per_learner + self.num_engines * self.num_gpus_per_engine

    @classmethod
    def of(cls, config: RunSettings) -> PlanRequest:
        """The sizes that a validated configuration asks for.

        Raises:
            ConfigError: nothing says what shape the model has.
        """
        engine: dict[str, Any] = config.engine_kwargs
        cache = engine.get("kv_cache_gib", engine.get("kv_cache_memory_bytes", 0) / GIB or None)
        if cache is None and config.engine == "vllm" and not config.num_gpus_per_engine:
            cache = VLLM_CPU_CACHE_GIB
        # The policy with its adapters switched off is its own reference.
        reference = config.kl_coeff > 0 and not config.lora_rank
        sizes: dict[str, Any] = {each.name: getattr(config, each.name, None) for each in fields(cls)}
        sizes |= {
            "shape": _shape(config),
            "num_learners": max(1, config.num_learners),
            "lora_rank": config.lora_rank or 0,
            "model_bytes": BYTES[config.model_dtype],
            "compute_bytes": BYTES[config.passes_dtype()],
            "num_references": reference + (config.teacher_sync_iterations is not None),
            "tensor_parallel_size": engine.get("tensor_parallel_size", 1),
            "engine_bytes": BYTES[config.engine_dtype()],
            "kv_cache_gib": cache,
            "gpu_memory_utilization": engine.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION),
            "max_batch": max_batch(engine),
            "num_engines": fewest_and_most(config.num_engines)[1],
            "num_env_runners": max(1, fewest_and_most(config.num_env_runners)[1]),
            "trajectories": config.group_size * config.tasks_per_iteration,
            "max_turns": max(entry.max_turns for entry in config.environment_entries()),
        }
        return cls(**sizes)


def most_rows(engine: str, num_gpus_per_engine: float) -> int:
    """Most requests that an engine decodes at a time where no setting says it."""
    return VLLM_CPU_ROWS if engine == "vllm" and not num_gpus_per_engine else MOST_ROWS


def max_batch(engine_kwargs: Mapping[str, Any]) -> int | None:
    """Most requests that an engine decodes at a time as ``engine_kwargs`` say it."""
    limit: int | None = engine_kwargs.get("max_batch") or engine_kwargs.get("max_num_seqs")
    return limit


def _shape(config: RunSettings) -> ModelShape:
    """Shape of the policy that a run would start from; no weights are trained or fetched."""
    from trial_ray.models.tiny import build_tokenizer, tiny_config

    start = config.warm_start or {}
    path = config.model_path or start.get("model_path")
    if path is not None:
        return model_shape(str(alfworld_tiny()) if path == ALFWORLD_TINY else HUB_NAMES.get(path, str(path)))
    tokenizer = build_tokenizer(config.environment_entries()[0].adapter.warm_start.vocabulary)
    return ModelShape.of_config(tiny_config(tokenizer, start.get("size", "tiny")))

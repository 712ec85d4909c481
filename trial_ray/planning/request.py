"""What a plan is made of: the sizes that a configuration asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.engines.arguments import GPU_MEMORY_UTILIZATION, VLLM_CPU_CACHE_GIB, VLLM_CPU_ROWS
from trial_ray.engines.decoding_cache import MOST_ROWS
from trial_ray.models.model_shape import ModelShape, model_shape
from trial_ray.models.packaged import ALFWORLD_TINY, HUB_NAMES, alfworld_tiny

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Sizes of a run.

    Attributes:
        shape: of the policy.
        num_learners: processes that learn, at least 1.
        gpus_per_learner: 0: they compute on the CPU.
        sharded: each learner holds its part of weights, gradients and optimizer.
        lora_rank: of adapters, which alone are trained; 0: all weights are.
        model_bytes: of a master weight.
        compute_bytes: of a number in the passes.
        num_references: frozen copies of the model beside the policy (reference, lagged teacher).
        gradient_checkpointing: activations are computed again in the backward pass.
        max_tokens_per_forward: most tokens in a pass.
        minibatch_rows: most turn rows of an optimizer step, over all learners.
        privileged_view: with which rows are scored a second time; ``None``: they are not.
        num_epochs: passes over an iteration's rows.
        engine: its name.
        num_engines: engine actors.
        gpus_per_engine: 0: it computes on the CPU.
        tensor_parallel: GPUs over which the weights of one engine are split.
        colocated: engine i and learner i take turns on one GPU, of which each reserves a part.
        engine_bytes: of a weight and of a cached number in an engine.
        kv_cache_gib: size of an engine's key-value cache; ``None``: what is left, or what its rows take.
        gpu_memory_utilization: share of a GPU that an engine takes, where ``kv_cache_gib`` is ``None``.
        max_batch: most requests that an engine decodes at a time; ``None``: the engine's own limit.
        max_prompt_tokens: limit of a prompt.
        max_response_tokens: limit of a response.
        num_env_runners: env-runner actors.
        episodes_in_flight: most episodes of one of them.
        trajectories: rollouts of an iteration.
        max_turns: limit of an episode.
    """

    shape: ModelShape
    num_learners: int
    gpus_per_learner: float
    sharded: bool
    lora_rank: int
    model_bytes: int
    compute_bytes: int
    num_references: int
    gradient_checkpointing: bool
    max_tokens_per_forward: int
    minibatch_rows: int
    privileged_view: str | None
    num_epochs: int
    engine: str
    num_engines: int
    gpus_per_engine: float
    tensor_parallel: int
    colocated: bool
    engine_bytes: int
    kv_cache_gib: float | None
    gpu_memory_utilization: float
    max_batch: int | None
    max_prompt_tokens: int
    max_response_tokens: int
    num_env_runners: int
    episodes_in_flight: int
    trajectories: int
    max_turns: int

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest turn row, which is also the longest request."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def pass_rows(self) -> int:
        """Most turn rows that a learner computes before a backward pass."""
        return math.ceil(self.minibatch_rows / self.num_learners)

    @property
    def pass_tokens(self) -> int:
        """Most tokens that a forward pass of the learner holds; a row that is longer than the limit still goes in whole."""
        return max(self.row_tokens, min(self.max_tokens_per_forward, self.pass_rows * self.row_tokens))

    @property
    def most_rows(self) -> int:
        """Most requests that an engine decodes at a time."""
        on_cpu = self.engine == "vllm" and not self.gpus_per_engine
        return self.max_batch or (VLLM_CPU_ROWS if on_cpu else MOST_ROWS)

    @property
    def requests_per_engine(self) -> int:
        """Most requests that an engine has at a time: a rollout asks for one after the other."""
        return math.ceil(self.trajectories / self.num_engines)

    @property
    def gpus(self) -> float:
        """GPUs that learners and engines take together."""
        return self.num_learners * self.gpus_per_learner + self.num_engines * self.gpus_per_engine

    @classmethod
    def of(cls, config: RunSettings) -> PlanRequest:
        """The sizes that a validated configuration asks for.

        Raises:
            ConfigError: nothing says what shape the model has.
        """
        engine: dict[str, Any] = config.engine_kwargs
        lora_rank = config.lora_rank or 0
        # The policy with its adapters switched off is its own reference.
        references = (config.kl_coeff > 0 and not lora_rank) + (config.teacher_sync_iterations is not None)
        return cls(
            shape=_shape(config),
            num_learners=max(1, config.num_learners),
            gpus_per_learner=config.num_gpus_per_learner,
            sharded=config.sharding == "fsdp",
            lora_rank=lora_rank,
            model_bytes=BYTES[config.model_dtype],
            compute_bytes=BYTES[config.passes_dtype()],
            num_references=references,
            gradient_checkpointing=config.gradient_checkpointing,
            max_tokens_per_forward=config.max_tokens_per_forward,
            minibatch_rows=config.minibatch_rows,
            privileged_view=config.privileged_view,
            num_epochs=config.num_epochs,
            engine=config.engine,
            num_engines=config.num_engines,
            gpus_per_engine=config.num_gpus_per_engine,
            tensor_parallel=engine.get("tensor_parallel_size", 1),
            colocated=config.colocate,
            engine_bytes=BYTES[config.engine_dtype()],
            kv_cache_gib=_cache_gib(config),
            gpu_memory_utilization=engine.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION),
            max_batch=engine.get("max_batch") or engine.get("max_num_seqs"),
            max_prompt_tokens=config.max_prompt_tokens,
            max_response_tokens=config.max_response_tokens,
            num_env_runners=max(1, config.num_env_runners),
            episodes_in_flight=config.max_episodes_in_flight,
            trajectories=config.group_size * config.tasks_per_iteration,
            max_turns=max(entry.max_turns for entry in config.environment_entries()),
        )


def _cache_gib(config: RunSettings) -> float | None:
    """Size of an engine's key-value cache, where it does not follow from memory or rows."""
    engine: dict[str, Any] = config.engine_kwargs
    size: float | None = engine.get("kv_cache_gib")
    if size is None and (number := engine.get("kv_cache_memory_bytes")) is not None:
        size = number / 2**30
    if size is None and config.engine == "vllm" and not config.num_gpus_per_engine:
        return VLLM_CPU_CACHE_GIB
    return size


def _shape(config: RunSettings) -> ModelShape:
    """Shape of the policy that a run would start from; nothing is trained, and no weights are fetched, to know it."""
    from trial_ray.models.tiny import build_tokenizer, tiny_config

    started = config.warm_start or {}
    path = config.model_path or started.get("model_path")
    if path is not None:
        return model_shape(str(alfworld_tiny()) if path == ALFWORLD_TINY else HUB_NAMES.get(path, str(path)))
    entry = config.environment_entries()[0]
    tokenizer = build_tokenizer(entry.adapter.vocabulary)
    return ModelShape.of_config(tiny_config(tokenizer, started.get("size", "tiny")))

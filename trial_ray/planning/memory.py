"""Memory of a run's actors by phase: sizes out of the configuration, times constants measured by ``benchmarks/bench_plan.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trial_ray.engines.arguments import GPU_MEMORY_UTILIZATION, VLLM_CPU_CACHE_GIB, VLLM_CPU_ROWS
from trial_ray.engines.decoding_cache import MEMORY_SHARE, MOST_ROWS, SLACK
from trial_ray.engines.transformers import PREFILL_TOKENS
from trial_ray.models.logprobs import DEFAULT_CHUNK_TOKENS
from trial_ray.models.model_shape import ModelShape, model_shape
from trial_ray.models.packaged import ALFWORLD_TINY, HUB_NAMES, alfworld_tiny

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES = 550 * 2**20
"""Resident memory of a process that has imported Ray, RLlib, torch and transformers, and holds no model yet; measured."""
DEVICE_CONTEXT_BYTES = 1 * GIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process on its GPU."""
HEAP_FACTOR = 1.1
"""Memory of a process over that of its tensors, for what passes allocate: allocators keep freed blocks; measured on the CPU."""
LOGIT_COPIES = 5
"""Float32 arrays of ``[chunk, vocabulary]`` that are alive when a chunk's log-probabilities and entropies are differentiated."""
ENGINE_CONTEXT_BYTES = 2 * GIB
"""CUDA context, compiled graphs and workspaces of an engine on a GPU."""
EPISODE_BYTES = 4 * 2**20
"""An environment in an env runner, with its loaded game."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Sizes of a run; attributes with the name of a setting have its value.

    Attributes:
        shape: of the policy.
        num_learners: processes that learn, at least 1.
        lora_rank: rank of the trained adapters; 0: all weights are trained.
        model_bytes: of a master weight.
        compute_bytes: of a number in the passes.
        num_references: frozen copies of the model beside the policy (reference, stale teacher).
        engine_bytes: of a weight and of a cached number in an engine.
        kv_cache_gib: size of an engine's key-value cache; ``None``: follows from free memory or rows.
        max_batch: most requests that an engine decodes at a time; ``None``: the engine's own limit.
        num_env_runners: at least 1.
        trajectories: rollouts of an iteration.
        max_turns: limit of an episode.
    """

    shape: ModelShape
    num_learners: int
    num_gpus_per_learner: float
    sharding: str
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
    def sharded(self) -> bool:
        """Whether each learner holds its part of weights, gradients and optimizer."""
        return self.sharding == "fsdp"

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
        on_cpu = self.engine == "vllm" and not self.num_gpus_per_engine
        return self.max_batch or (VLLM_CPU_ROWS if on_cpu else MOST_ROWS)

    @property
    def requests_per_engine(self) -> int:
        """Most requests that an engine has at a time: a rollout asks for one after the other."""
        return math.ceil(self.trajectories / self.num_engines)

    @property
    def request_cache_bytes(self) -> int:
        """Keys and values of a request of full length."""
        return self.shape.kv_elements_per_token * self.engine_bytes * self.row_tokens

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
            "kv_cache_gib": _cache_gib(config),
            "gpu_memory_utilization": engine.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION),
            "max_batch": engine.get("max_batch") or engine.get("max_num_seqs"),
            "num_env_runners": max(1, config.num_env_runners),
            "trajectories": config.group_size * config.tasks_per_iteration,
            "max_turns": max(entry.max_turns for entry in config.environment_entries()),
        }
        return cls(**sizes)


def _cache_gib(config: RunSettings) -> float | None:
    engine: dict[str, Any] = config.engine_kwargs
    size: float | None = engine.get("kv_cache_gib")
    if size is None and (number := engine.get("kv_cache_memory_bytes")) is not None:
        size = number / GIB
    if size is None and config.engine == "vllm" and not config.num_gpus_per_engine:
        return VLLM_CPU_CACHE_GIB
    return size


def _shape(config: RunSettings) -> ModelShape:
    """Shape of the policy that a run would start from; no weights are trained or fetched."""
    from trial_ray.models.tiny import build_tokenizer, tiny_config

    start = config.warm_start or {}
    path = config.model_path or start.get("model_path")
    if path is not None:
        return model_shape(str(alfworld_tiny()) if path == ALFWORLD_TINY else HUB_NAMES.get(path, str(path)))
    tokenizer = build_tokenizer(config.environment_entries()[0].adapter.warm_start.vocabulary)
    return ModelShape.of_config(tiny_config(tokenizer, start.get("size", "tiny")))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one actor holds at its peak.

    Attributes:
        actor: kind of actor.
        count: number of these actors.
        on_gpu: whether it is a GPU's memory; else the host's.
        items: bytes by purpose.
        kept: bytes of these that a learner holds between two updates.
        rows: requests of full length that an engine's key-value cache holds; 0 where it would not start.
    """

    actor: str
    count: int
    on_gpu: bool
    items: Mapping[str, float]
    kept: float = 0.0
    rows: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of one actor."""
        return sum(self.items.values())


def learner_memory(request: PlanRequest) -> Memory:
    """Peak of one learner on its device, in the middle of a backward pass."""
    shards = request.num_learners if request.sharded else 1
    parameters = request.shape.parameters
    trained = lora_parameters(request) or parameters
    frozen_bytes = min(request.compute_bytes, request.model_bytes)
    on_gpu = request.num_gpus_per_learner > 0
    kept = {
        "weights": parameters * (frozen_bytes if request.lora_rank else request.model_bytes) / shards,
        "adapters": trained * request.model_bytes if request.lora_rank else 0.0,
        "optimizer": 2 * trained * request.model_bytes / shards,
        "reference": request.num_references * parameters * frozen_bytes / shards,
    }
    items = {
        **kept,
        "gradients": trained * request.model_bytes / shards,
        "weights in compute dtype": _compute_copy(request),
        "activations": HEAP_FACTOR * activation_bytes(request),
        "logits": HEAP_FACTOR * _logit_bytes(request),
        "process": DEVICE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    return Memory("learner", request.num_learners, on_gpu, items, kept=sum(kept.values()) + items["process"])


def lora_parameters(request: PlanRequest) -> int:
    """Parameters of adapters of rank r on all linear layers of the decoder: r (inputs + outputs) each; 0 without adapters."""
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.intermediate)
    return request.lora_rank * shape.layers * widths


def layer_bytes_per_token(request: PlanRequest) -> float:
    """What autograd saves of one token in one decoder layer.

    Each of two norms saves its input and the normalised input, in the residual stream's type. Each linear layer saves its
    input in the compute dtype: one array for those that share it, or, under autocast, a copy for each. Attention saves query,
    key, value and output, the gated feed-forward network four arrays of its width, norms of query and key two each.
    """
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    autocast = request.compute_bytes != request.model_bytes
    norms = 4 * shape.hidden + (query + key if shape.qk_norm else 0)
    inputs = (5 if autocast else 2) * shape.hidden + (query + key if shape.qk_norm else 0)
    inputs += 2 * query + 2 * key + 4 * shape.intermediate
    return norms * request.model_bytes + inputs * request.compute_bytes


def activation_bytes(request: PlanRequest) -> float:
    """Activations of the largest pass: all layers', or their inputs and one layer's, and one layer's gradients."""
    layer = layer_bytes_per_token(request)
    if request.gradient_checkpointing:
        saved = request.shape.layers * request.shape.hidden * request.model_bytes + layer
    else:
        saved = request.shape.layers * layer
    return request.pass_tokens * (saved + layer)


def _compute_copy(request: PlanRequest) -> float:
    """Autocast keeps a copy of every weight while a pass lasts; FSDP gathers a layer or the head at a time, and the next."""
    if request.lora_rank or (request.compute_bytes == request.model_bytes and not request.sharded):
        return 0.0
    shape = request.shape
    if request.sharded:
        layer = (shape.parameters - shape.embedding_parameters * (1 if shape.tied else 2)) / shape.layers
        return request.compute_bytes * (shape.embedding_parameters + 2 * layer)
    return request.compute_bytes * shape.matmul_parameters


def _logit_bytes(request: PlanRequest) -> float:
    rows = min(request.pass_rows, math.ceil(request.pass_tokens / request.row_tokens))
    tokens = min(DEFAULT_CHUNK_TOKENS, rows * request.max_response_tokens)
    return LOGIT_COPIES * 4 * tokens * request.shape.vocabulary


def engine_memory(request: PlanRequest, free: float | None) -> Memory:
    """Memory of one engine on one of its devices.

    Args:
        request: sizes.
        free: bytes of the device, or of the host, that the engine may take; ``None`` where that is not known.
    """
    on_gpu, split = request.num_gpus_per_engine > 0, request.tensor_parallel_size
    per_request = request.request_cache_bytes / split
    items = {
        "weights": request.shape.parameters * request.engine_bytes / split,
        "workspace": _engine_workspace(request),
        "process": ENGINE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    if request.engine != "vllm":
        rows, cache = _rows_in_place(request, None if free is None else free - items["weights"] - items["process"])
    else:
        left = max(per_request, (free or 0.0) - sum(items.values()))
        cache = left if request.kv_cache_gib is None else request.kv_cache_gib * GIB
        rows = cache / per_request
    return Memory("engine", request.num_engines, on_gpu, {**items, "key-value cache": cache}, rows=rows)


def _rows_in_place(request: PlanRequest, free: float | None) -> tuple[float, float]:
    """Rows that the transformers engine decodes at a time, and the bytes of their keys and values.

    They are written in place, with free columns on both sides (``DecodingCache``). When a buffer grows, one layer after the other
    moves to a new one.

    Args:
        request: sizes.
        free: bytes that are left beside the model; ``None`` where that is not known.
    """
    row = request.request_cache_bytes * (1 + 2 / SLACK)
    rows = min(request.most_rows, request.requests_per_engine)
    if request.max_batch is None and free is not None:
        rows = min(rows, int(free * MEMORY_SHARE / row))
    if rows < 1:  # the engine does not start where less is free
        return 0.0, row / MEMORY_SHARE
    return rows, rows * row * (1 + 1 / request.shape.layers)


def _engine_workspace(request: PlanRequest) -> float:
    shape = request.shape
    tokens = PREFILL_TOKENS if request.num_gpus_per_engine else max(PREFILL_TOKENS, request.row_tokens)
    widest = 2 * shape.intermediate + 4 * shape.hidden
    logits = 3 * 4 * request.most_rows * shape.vocabulary
    return tokens * widest * request.engine_bytes / request.tensor_parallel_size + logits


def host_memory(request: PlanRequest) -> tuple[Memory, ...]:
    """Memory of the processes that hold no model, and of weights in transfer."""
    environments = EPISODE_BYTES * request.max_episodes_in_flight
    weights = 2 * request.shape.parameters * request.engine_bytes
    return (
        Memory("driver", 1, False, {"process": PROCESS_BYTES}),
        Memory("env runner", request.num_env_runners, False, {"process": PROCESS_BYTES, "environments": environments}),
        Memory("object store", 1, False, {"weights on their way": weights}),
    )

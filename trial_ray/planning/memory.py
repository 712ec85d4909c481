"""Memory of a run's actors: what the sizes add up to, with the constants that were measured (``benchmarks/bench_plan.py``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trial_ray.engines.decoding_cache import MEMORY_SHARE, SLACK
from trial_ray.engines.transformers import PREFILL_TOKENS
from trial_ray.models.logprobs import DEFAULT_CHUNK_TOKENS
from trial_ray.planning.request import PlanRequest

GIB = 2**30
PROCESS_BYTES = 550 * 2**20
"""Resident memory of a process that has imported Ray, RLlib, torch and transformers, and holds no model yet; measured."""
DEVICE_CONTEXT_BYTES = 1 * GIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process on its GPU."""
HEAP_FACTOR = 1.1
"""What a process holds over what its tensors take, for what passes allocate: allocators keep freed blocks; measured on the CPU."""
LOGIT_COPIES = 5
"""Float32 arrays of ``[chunk, vocabulary]`` that are alive when a chunk's log-probabilities and entropies are differentiated."""
ENGINE_CONTEXT_BYTES = 2 * GIB
"""CUDA context, compiled graphs and workspaces of an engine on a GPU."""
SLEEPING_ENGINE_BYTES = 1 * GIB
"""What an engine that sleeps leaves on its GPU: context and compiled graphs."""
EPISODE_BYTES = 4 * 2**20
"""An environment in an env runner, with its loaded game."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What one actor holds at its peak, in bytes by what it is for.

    Attributes:
        actor: what kind of actor.
        count: how many of them there are.
        on_gpu: whether it is a GPU's memory; else the host's.
        items: bytes by purpose.
        kept: of them, what a learner holds between two updates.
    """

    actor: str
    count: int
    on_gpu: bool
    items: Mapping[str, float]
    kept: float = 0.0

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
    on_gpu = request.gpus_per_learner > 0
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


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """What an engine finds on its device.

    Attributes:
        memory: what it takes.
        sequences: requests of full length that its key-value cache holds at a time; 0 where it would not start.
    """

    memory: Memory
    sequences: float


def engine_room(request: PlanRequest, free: float | None) -> EngineRoom:
    """Memory of one engine on one of its devices.

    Args:
        request: sizes.
        free: bytes of the device, or of the host, that the engine may take; ``None`` where that is not known.
    """
    on_gpu, split = request.gpus_per_engine > 0, request.tensor_parallel
    shape = request.shape
    per_sequence = shape.kv_elements_per_token * request.engine_bytes * request.row_tokens / split
    items = {
        "weights": shape.parameters * request.engine_bytes / split,
        "workspace": _engine_workspace(request),
        "process": ENGINE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    if request.engine != "vllm":
        rows, cache = _rows_in_place(request, None if free is None else free - items["weights"] - items["process"])
    else:
        left = max(per_sequence, (free or 0.0) - sum(items.values()))
        cache = left if request.kv_cache_gib is None else request.kv_cache_gib * GIB
        rows = cache / per_sequence
    memory = Memory("engine", request.num_engines, on_gpu, {**items, "key-value cache": cache})
    return EngineRoom(memory, rows)


def _rows_in_place(request: PlanRequest, free: float | None) -> tuple[float, float]:
    """Rows that the transformers engine decodes at a time, and the bytes of their keys and values.

    They are written in place, with free columns on both sides (``DecodingCache``). When a buffer grows, one layer after the other
    moves to a new one.

    Args:
        request: sizes.
        free: bytes that are left beside the model; ``None`` where that is not known.
    """
    shape = request.shape
    row = shape.kv_elements_per_token * request.engine_bytes * request.row_tokens * (1 + 2 / SLACK)
    rows = min(request.most_rows, request.requests_per_engine)
    if request.max_batch is None and free is not None:
        rows = min(rows, int(free * MEMORY_SHARE / row))
    if rows < 1:  # the engine does not start where less is free
        return 0.0, row / MEMORY_SHARE
    return rows, rows * row * (1 + 1 / shape.layers)


def _engine_workspace(request: PlanRequest) -> float:
    shape = request.shape
    tokens = PREFILL_TOKENS if request.gpus_per_engine else max(PREFILL_TOKENS, request.row_tokens)
    widest = 2 * shape.intermediate + 4 * shape.hidden
    logits = 3 * 4 * request.most_rows * shape.vocabulary
    return tokens * widest * request.engine_bytes / request.tensor_parallel + logits


def host_memory(request: PlanRequest) -> list[Memory]:
    """What processes hold in their hosts' memory beside models on devices."""
    weights = request.shape.parameters * request.engine_bytes
    driver = {"process": PROCESS_BYTES}
    runner = {"process": PROCESS_BYTES, "environments": EPISODE_BYTES * request.episodes_in_flight}
    return [
        Memory("driver", 1, False, driver),
        Memory("env runner", request.num_env_runners, False, runner),
        Memory("object store", 1, False, {"weights on their way": 2 * weights}),
    ]

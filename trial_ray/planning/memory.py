"""Sizes of a run, read from its configuration, and the memory of its actors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trial_ray.config.sampling import actor_range
from trial_ray.engines.settings import (
    GPU_MEMORY_UTILIZATION,
    MAX_ROWS,
    MEMORY_SHARE,
    PREFILL_TOKENS,
    SLACK,
    VLLM_CPU_CACHE_GIB,
    VLLM_CPU_ROWS,
)
from trial_ray.models.folders import ALFWORLD_TINY, HUB_NAMES, alfworld_tiny
from trial_ray.models.logprobs import DEFAULT_CHUNK_TOKENS
from trial_ray.models.model_shape import ModelShape, model_shape

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROCESS_BYTES = 550 * 2**20
"""Resident memory of a process that has imported Ray, RLlib, torch and transformers but has not loaded a model; measured."""
DEVICE_CONTEXT_BYTES = 1 * GIB
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process."""
ENGINE_CONTEXT_BYTES = 2 * GIB
"""CUDA context, compiled graphs and workspaces of an engine on a GPU."""
HEAP_FACTOR = 1.1
"""Ratio of the memory that forward and backward passes allocate to the size of their tensors, measured on the CPU. It is above
1 because allocators keep freed blocks."""
SCORING_LOGITS, FORWARD_LOGITS, BACKWARD_LOGITS, LAST_LOGITS = 2, 4, 5, 1.5
"""Numbers of float32 ``[chunk, vocabulary]`` arrays that are alive for a chunk of tokens, counted in traces: in scoring, in the
forward pass of an update (with entropies), in its backward pass, and in the matrix product for the output head's gradient."""


# -- sizes of a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanRequest:
    """Sizes of a run; an attribute with the name of a setting has the value of the setting.

    Attributes:
        shape: shape of the policy.
        num_learners: number of learners, at least 1.
        num_engines, num_env_runners: maximum number of actors, at least 1.
        lora_rank: rank of the trained LoRA adapters; 0 if all weights are trained.
        model_bytes: bytes of a master weight.
        compute_bytes: bytes of a number in the forward and backward passes.
        num_references: number of frozen copies of the model in addition to the policy (reference, stale teacher).
        teacher_share: parameters of the teacher model as a multiple of the policy's; 0 without a teacher model.
        engine_bytes: bytes of a weight and of a cached number in an engine.
        kv_cache_gib: size of an engine's key-value cache; ``None`` if it depends on free memory or the number of requests.
        max_batch: maximum number of requests that an engine decodes at a time; ``None`` for the engine's own limit.
        trajectories: number of rollouts of an iteration.
        evaluated: maximum number of rollouts of an evaluation that are played at a time.
        environment_processes: whether environments run in processes of their own.
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
    teacher_share: float
    gradient_checkpointing: bool
    max_tokens_per_forward: int
    minibatch_rows: int
    prompt_style: str
    teacher_context: str | None
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
    evaluated: int
    environment_processes: bool
    max_staleness: int
    sleep_level: int
    weight_transfer: str
    teacher_sync_iterations: int | None

    @classmethod
    def of(cls, config: RunSettings) -> PlanRequest:
        """Return the sizes of a run from a validated configuration.

        Raises:
            ConfigError: the shape of the model cannot be determined.
        """
        engine: dict[str, Any] = config.engine_kwargs
        cache = engine.get("kv_cache_gib", engine.get("kv_cache_memory_bytes", 0) / GIB or None)
        if cache is None and config.engine == "vllm" and not config.num_gpus_per_engine:
            cache = VLLM_CPU_CACHE_GIB
        # With LoRA adapters, the policy without them is the reference, which needs no copy.
        reference = config.ref_kl_coeff > 0 and not config.lora_rank
        entries, chosen = config.environment_entries(), config.environment_processes
        num_env_runners = max(1, actor_range(config.num_env_runners)[1])
        evaluated = num_env_runners * config.max_episodes_in_flight if config.evaluation_split else 0
        shape = _shape(config)
        sizes: dict[str, Any] = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        sizes |= {
            "shape": shape,
            "num_learners": max(1, config.num_learners),
            "lora_rank": config.lora_rank or 0,
            "model_bytes": BYTES[config.model_dtype],
            "compute_bytes": BYTES[config.passes_dtype()],
            "num_references": reference + (config.teacher_sync_iterations is not None),
            "teacher_share": _model_shape(config.teacher_model).parameters / shape.parameters
            if config.teacher_model
            else 0.0,
            "tensor_parallel_size": engine.get("tensor_parallel_size", 1),
            "engine_bytes": BYTES[config.engine_dtype()],
            "kv_cache_gib": cache,
            "gpu_memory_utilization": engine.get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION),
            "max_batch": engine.get("max_batch") or engine.get("max_num_seqs"),
            "num_engines": actor_range(config.num_engines)[1],
            "num_env_runners": num_env_runners,
            "trajectories": config.group_size * config.tasks_per_iteration,
            "max_turns": max(entry.max_turns for entry in entries),
            "evaluated": min(evaluated, config.evaluation_num_tasks or evaluated),
            "environment_processes": any(entry.adapter.own_process if chosen is None else chosen for entry in entries),
        }
        return cls(**sizes)

    @property
    def row_tokens(self) -> int:
        """Maximum number of tokens of a turn (prompt and response), which is one request to an engine."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def max_rows(self) -> int:
        """Maximum number of requests that an engine decodes at a time."""
        on_cpu = self.engine == "vllm" and not self.num_gpus_per_engine
        return self.max_batch or (VLLM_CPU_ROWS if on_cpu else MAX_ROWS)

    @property
    def requests_per_engine(self) -> int:
        """Maximum number of requests that an engine has at a time: each rollout sends one request at a time."""
        return math.ceil(max(self.trajectories * (1 + self.max_staleness), self.evaluated) / self.num_engines)

    @property
    def shards(self) -> int:
        """Number of learners that share one copy of the weights."""
        return (self.fsdp_size or self.num_learners) if self.sharding == "fsdp" else 1

    @property
    def gpus(self) -> float:
        """Total number of GPUs of learners and engines."""
        return self.num_learners * self.num_gpus_per_learner + self.num_engines * self.num_gpus_per_engine

    @property
    def autocasts(self) -> bool:
        """True if autocast converts weights and inputs to the compute dtype; FSDP gathers weights in this dtype instead."""
        return self.compute_bytes != self.model_bytes and self.sharding != "fsdp"

    @property
    def stream_bytes(self) -> int:
        """Bytes per number of the residual stream: under autocast it has the embedding's dtype, with FSDP the compute dtype."""
        return self.model_bytes if self.autocasts else self.compute_bytes

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters: all or, with LoRA of rank r, r · (inputs + outputs) per adapted linear layer."""
        shape = self.shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        widths = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.intermediate)
        return self.lora_rank * shape.layers * widths or shape.parameters


def _shape(config: RunSettings) -> ModelShape:
    """Return the shape of a run's initial policy, without downloading its weights or training it in a warm start."""
    from trial_ray.models.tiny import build_tokenizer, tiny_config

    start = config.warm_start or {}
    path = config.model_path or start.get("model_path")
    if path is not None:
        return _model_shape(str(path))
    tokenizer = build_tokenizer(config.environment_entries()[0].adapter.warm_start.vocabulary)
    return ModelShape.of_config(tiny_config(tokenizer, start.get("size", "tiny")))


def _model_shape(path: str) -> ModelShape:
    return model_shape(str(alfworld_tiny()) if path == ALFWORLD_TINY else HUB_NAMES.get(path, path))


# -- actors -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Peak memory of one actor, in bytes.

    Attributes:
        actor, count: kind and number of actors.
        on_gpu: True for GPU memory, False for host memory.
        items: bytes by purpose.
        kept: the bytes that a learner also keeps between two updates.
        rows: number of full-length requests that fit in an engine's key-value cache; 0 if the engine would not start.
    """

    actor: str
    count: int
    on_gpu: bool
    items: Mapping[str, float]
    kept: float = 0.0
    rows: float = 0.0

    @property
    def total(self) -> float:
        """Total bytes of one actor."""
        return sum(self.items.values())


def learner_memory(request: PlanRequest) -> Memory:
    """Return the peak memory of one learner on its device, over all phases."""
    return max(learner_phases(request).values(), key=lambda memory: memory.total)


def learner_phases(request: PlanRequest) -> dict[str, Memory]:
    """Return the peak memory of one learner by phase: scoring, forward and backward pass of an update, and optimizer step.

    A pass peaks in a decoder layer or in the output head, whichever needs more memory. In all passes of a minibatch except the
    first, the gradients of the earlier passes are in memory.
    """
    shape, trained = request.shape, request.trained_parameters
    # Frozen models keep matrices in the compute dtype, and the embedding in the model dtype.
    frozen = (shape.parameters - shape.embedding_parameters) * min(request.compute_bytes, request.model_bytes)
    frozen += shape.embedding_parameters * request.model_bytes
    adapters = request.lora_rank > 0
    kept = {
        "weights": (frozen if adapters else shape.parameters * request.model_bytes) / request.shards,
        "adapters": adapters * trained * request.model_bytes / request.shards,
        "optimizer": 2 * trained * request.model_bytes / request.shards,
        "reference": request.num_references * frozen / request.shards,
        "teacher": request.teacher_share * frozen / request.shards,
        "process": DEVICE_CONTEXT_BYTES if request.num_gpus_per_learner else PROCESS_BYTES,
    }
    gradients = trained * request.model_bytes / request.shards
    # The check for finite gradients allocates the absolute values of the largest tensor and three bool arrays of its size.
    flags = (not adapters) * (request.model_bytes + 3) * shape.embedding_parameters / request.shards

    def memory(phase: str, weights: float, activations: float, logits: float, gradient: float = 0.0) -> Memory:
        items = {
            **kept,
            "gradients": (phase != "scoring") * gradients,
            "weights in compute dtype": weights,
            "activations": activations,
            "logits": logits,
            "head's gradient": gradient,
            "temporaries": (phase == "step") * flags,
            "allocator": (HEAP_FACTOR - 1) * (activations + logits),
        }
        on_gpu = request.num_gpus_per_learner > 0
        return Memory("learner", request.num_learners, on_gpu, items, kept=sum(kept.values()))

    by_phase = _passes(request) | {"step": [(0.0, 0.0, 0.0)]}
    return {
        phase: max((memory(phase, *sizes) for sizes in passes), key=lambda memory: memory.total)
        for phase, passes in by_phase.items()
    }


def _passes(request: PlanRequest) -> dict[str, list[tuple[float, ...]]]:
    """Return the bytes of each phase's passes, at their peaks in a decoder layer and in the output head.

    The bytes of a peak are: weights in the compute dtype, activations, logits, and optionally the head's gradient.
    """
    shape, stream, computed = request.shape, request.stream_bytes, request.compute_bytes
    sharded, adapters, recomputed = request.sharding == "fsdp", request.lora_rank > 0, request.gradient_checkpointing
    casts = request.autocasts
    head = shape.vocabulary * shape.hidden
    root = shape.embedding_parameters + (0 if shape.tied else head)
    layer = (shape.parameters - root) / shape.layers
    # A row (one turn) that is longer than the token limit of a pass is not split.
    rows = math.ceil(request.minibatch_rows / request.num_learners)
    tokens = max(request.row_tokens, min(request.max_tokens_per_forward, rows * request.row_tokens))
    targets = min(rows, math.ceil(tokens / request.row_tokens)) * request.max_response_tokens
    logits = 4 * min(DEFAULT_CHUNK_TOKENS, targets) * shape.vocabulary
    states = targets * shape.hidden * stream
    # A frozen head that is not tied to the embedding needs no copy in the compute dtype.
    head_copy = head * computed * (casts and (shape.tied or not adapters))
    # Autocast keeps copies of all trained layers (with LoRA, of the adapters) in the compute dtype until a pass ends; FSDP keeps
    # copies only of the gathered layers. The root modules (embedding and head) of reference models stay gathered until all models
    # have scored.
    cast = casts * computed * (request.trained_parameters if adapters else shape.layers * layer)
    in_layers, in_heads = ((root + 2 * layer) * computed, root * computed) if sharded else (cast, cast + head_copy)
    roots = sharded * request.num_references * root * computed

    # A layer has four temporary arrays of the residual stream's width, and three (LoRA: four) of the feed-forward width.
    passing = tokens * (4 * shape.hidden * stream + (3 + adapters) * shape.intermediate * computed)
    per_token = layer_bytes_per_token(request)
    by_layers = tokens * shape.layers * (shape.hidden * stream if recomputed else per_token)
    saved = by_layers + tokens * shape.hidden * (stream + 4)  # The final norm saves as much as a norm in a layer.
    # The backward pass of the head adds up the weight gradients of all chunks of tokens in one array of ``summed`` bytes.
    head_bytes = computed if sharded else request.model_bytes
    summed = (not adapters) * head * head_bytes
    product = (not adapters) * head * (4 + sharded * head_bytes) + LAST_LOGITS * logits
    has_chunks = targets > DEFAULT_CHUNK_TOKENS
    # The last layer's backward pass has gradients of two arrays as wide as the feed-forward network and of one as wide as the
    # residual stream; with checkpointing also the arrays that autograd saves in one layer (`per_token`), which are recomputed.
    widths = 2 * shape.intermediate * computed + shape.hidden * stream
    # A checkpointed layer copies its weights to the compute dtype again when it is recomputed.
    copies = in_layers if sharded or not recomputed else layer * computed * casts
    exchanged = (not adapters) * layer * (4 + computed) * sharded
    return {
        "scoring": [(in_layers + roots, passing, 0.0), (in_heads + roots, states, SCORING_LOGITS * logits)],
        "forward": [(in_layers, saved + passing, 0.0), (in_heads, saved + states, FORWARD_LOGITS * logits)],
        "backward": [
            (
                head_copy if recomputed and not sharded else in_heads,
                saved + 2 * states,
                max(BACKWARD_LOGITS * logits, product) + has_chunks * summed,
            ),
            (copies + exchanged, by_layers + tokens * (recomputed * per_token + widths), 0.0, summed * shape.tied),
        ],
    }


def layer_bytes_per_token(request: PlanRequest) -> float:
    """Return the bytes that autograd saves per token in one decoder layer.

    Each of the two norms saves its input in float32 and the normalised input in the residual stream's dtype. Each linear layer
    saves its input in the compute dtype: one array for all layers with the same input or, under autocast, one copy per layer.
    Attention saves query, key, value, output, and one float32 sum per head. The gated feed-forward network saves four arrays of
    its width. The norms of query and key save the same arrays as the other norms. LoRA adapters save a copy of the attention
    output, because they convert it to their dtype and back.
    """
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * shape.hidden * (4 + request.stream_bytes)
    norms += shape.qk_norm * (query + key) * (4 + request.compute_bytes)
    inputs = (5 if request.autocasts else 2) * shape.hidden + 4 * shape.intermediate
    attention = (2 + bool(request.lora_rank)) * query + 2 * key
    return norms + (inputs + attention) * request.compute_bytes + 4 * shape.heads


def engine_memory(request: PlanRequest, free: float | None) -> Memory:
    """Return the memory of one engine on one of its devices.

    Args:
        request: sizes of the run.
        free: bytes of the device, or of the host, that the engine may use; ``None`` if unknown.
    """
    shape, on_gpu, split = request.shape, request.num_gpus_per_engine > 0, request.tensor_parallel_size
    widest = 2 * shape.intermediate + 4 * shape.hidden
    row = shape.kv_elements_per_token * request.engine_bytes * request.row_tokens / split
    items = {
        "weights": shape.parameters * request.engine_bytes / split,
        "process": ENGINE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    left = (math.inf if free is None else free) - sum(items.values())
    workspace = PREFILL_TOKENS * widest * request.engine_bytes / split + 3 * 4 * request.max_rows * shape.vocabulary
    if request.engine == "vllm":
        cache = max(row, 0.0 if free is None else left - workspace)
        cache = cache if request.kv_cache_gib is None else request.kv_cache_gib * GIB
        rows = cache / row
    else:
        # When the transformers engine enlarges its key-value cache, it adds 1 / SLACK of the used columns before and after them.
        row *= 1 + 2 / SLACK
        rows = min(request.max_rows, request.requests_per_engine)
        if request.max_batch is None:
            rows = max(0, math.floor(min(rows, left * MEMORY_SHARE / row)))
        # If no row fits, report the free memory that the engine needs to start: one row fills MEMORY_SHARE of it.
        cache = rows * row or row / MEMORY_SHARE
    items |= {"workspace": workspace, "key-value cache": cache}
    return Memory("engine", request.num_engines, on_gpu, items, rows=rows)

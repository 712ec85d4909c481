"""Memory of a run's actors, from its configuration and constants of ``benchmarks/bench_plan.py``, and whether it fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trial_ray.engines.arguments import GPU_MEMORY_UTILIZATION, VLLM_CPU_CACHE_GIB, VLLM_CPU_ROWS
from trial_ray.engines.decoding_cache import MEMORY_SHARE, MOST_ROWS, SLACK
from trial_ray.engines.transformers import PREFILL_TOKENS
from trial_ray.errors import ConfigError
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
"""CUDA context, cuBLAS workspaces and NCCL buffers of a process."""
SLEEPING_ENGINE_BYTES = 2 * GIB
"""Left on the device of an engine that sleeps: CUDA context, kernels, cuBLAS workspaces, and the CUDA graphs without their
memory, which is offloaded. An assumption; vLLM logs the measured number whenever an engine falls asleep."""
ENGINE_CONTEXT_BYTES = 2 * GIB
"""CUDA context, compiled graphs and workspaces of an engine on a GPU."""
HEAP_FACTOR = 1.1
"""Memory of a process over that of its tensors, for what passes allocate: allocators keep freed blocks; measured on the CPU."""
LOGIT_COPIES = 5
"""Float32 arrays of ``[chunk, vocabulary]`` that are alive when a chunk's log-probabilities and entropies are differentiated."""
EPISODE_BYTES = 4 * 2**20
"""An environment in an env runner, with its loaded game."""
LORA_RANK = 32
"""Rank of the adapters that are proposed where all weights do not fit."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Sizes of a run; attributes with the name of a setting have its value.

    Attributes:
        shape: of the policy.
        num_learners, num_env_runners: at least 1.
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
        on_cpu = self.engine == "vllm" and not self.num_gpus_per_engine
        return self.max_batch or (VLLM_CPU_ROWS if on_cpu else MOST_ROWS)

    @property
    def requests_per_engine(self) -> int:
        """Most requests that an engine has at a time: a rollout asks for one after the other."""
        return math.ceil(self.trajectories / self.num_engines)

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
            "max_batch": engine.get("max_batch") or engine.get("max_num_seqs"),
            "num_env_runners": max(1, config.num_env_runners),
            "trajectories": config.group_size * config.tasks_per_iteration,
            "max_turns": max(entry.max_turns for entry in config.environment_entries()),
        }
        return cls(**sizes)


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
        actor, count: kind and number of actors.
        on_gpu: whether it is a GPU's memory, else the host's.
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
    shape, on_gpu, sharded = request.shape, request.num_gpus_per_learner > 0, request.sharding == "fsdp"
    shards = (request.fsdp_size or request.num_learners) if sharded else 1
    trained = lora_parameters(request) or shape.parameters
    frozen_bytes = min(request.compute_bytes, request.model_bytes)
    kept = {
        "weights": shape.parameters * (frozen_bytes if request.lora_rank else request.model_bytes) / shards,
        "adapters": trained * request.model_bytes if request.lora_rank else 0.0,
        "optimizer": 2 * trained * request.model_bytes / shards,
        "reference": request.num_references * shape.parameters * frozen_bytes / shards,
        "process": DEVICE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    # A row that is longer than the limit of a pass still goes in whole.
    pass_rows = math.ceil(request.minibatch_rows / request.num_learners)
    pass_tokens = max(request.row_tokens, min(request.max_tokens_per_forward, pass_rows * request.row_tokens))
    layer = layer_bytes_per_token(request)
    saved = shape.hidden * request.model_bytes if request.gradient_checkpointing else layer
    # All layers', or their inputs and one layer's; and one layer's gradients.
    activations = pass_tokens * (shape.layers * saved + layer * (1 + request.gradient_checkpointing))
    # Autocast keeps a copy of every weight while a pass lasts; FSDP gathers a layer or the head at a time.
    copied = shape.embedding_parameters if sharded else shape.matmul_parameters
    if request.lora_rank or (request.compute_bytes == request.model_bytes and not sharded):
        copied = 0
    rows = min(pass_rows, math.ceil(pass_tokens / request.row_tokens))
    chunk = min(DEFAULT_CHUNK_TOKENS, rows * request.max_response_tokens)
    items = {
        **kept,
        "gradients": trained * request.model_bytes / shards,
        "weights in compute dtype": copied * request.compute_bytes,
        "activations": HEAP_FACTOR * activations,
        "logits": HEAP_FACTOR * LOGIT_COPIES * 4 * chunk * shape.vocabulary,
    }
    return Memory("learner", request.num_learners, on_gpu, items, kept=sum(kept.values()))


def lora_parameters(request: PlanRequest) -> int:
    """Parameters of adapters of rank r on all linear layers of the decoder: r (inputs + outputs) each; 0 without adapters."""
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.intermediate)
    return request.lora_rank * shape.layers * widths


def layer_bytes_per_token(request: PlanRequest) -> float:
    """Bytes that autograd saves of one token in one decoder layer.

    Each of two norms saves its input and the normalised input, in the residual stream's type. Each linear layer saves its
    input in the compute dtype: one array for those that share it, or, under autocast, a copy for each. Attention saves query,
    key, value and output, the gated feed-forward network four arrays of its width, norms of query and key two each.
    """
    shape = request.shape
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    autocast = request.compute_bytes != request.model_bytes
    qk_norms = (query + key) * shape.qk_norm
    inputs = (5 if autocast else 2) * shape.hidden + qk_norms + 2 * query + 2 * key + 4 * shape.intermediate
    return (4 * shape.hidden + qk_norms) * request.model_bytes + inputs * request.compute_bytes


def engine_memory(request: PlanRequest, free: float | None) -> Memory:
    """Memory of one engine on one of its devices.

    Args:
        request: sizes.
        free: bytes of the device, or of the host, that the engine may take; ``None`` where that is not known.
    """
    shape, on_gpu, split = request.shape, request.num_gpus_per_engine > 0, request.tensor_parallel_size
    widest = 2 * shape.intermediate + 4 * shape.hidden
    row = shape.kv_elements_per_token * request.engine_bytes * request.row_tokens / split
    items = {
        "weights": shape.parameters * request.engine_bytes / split,
        "process": ENGINE_CONTEXT_BYTES if on_gpu else PROCESS_BYTES,
    }
    left = (math.inf if free is None else free) - sum(items.values())
    workspace = PREFILL_TOKENS * widest * request.engine_bytes / split + 3 * 4 * request.most_rows * shape.vocabulary
    if request.engine == "vllm":
        cache = max(row, 0.0 if free is None else left - workspace)
        cache = cache if request.kv_cache_gib is None else request.kv_cache_gib * GIB
        rows = cache / row
    else:  # rows are written in place, with free columns on both sides (DecodingCache)
        row *= 1 + 2 / SLACK
        rows = min(request.most_rows, request.requests_per_engine)
        if request.max_batch is None:
            rows = max(0, math.floor(min(rows, left * MEMORY_SHARE / row)))
        cache = rows * row or row / MEMORY_SHARE  # where less is free, the engine does not start
    items |= {"workspace": workspace, "key-value cache": cache}
    return Memory("engine", request.num_engines, on_gpu, items, rows=rows)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run is to start; ``None`` stands for an unknown number.

    Attributes:
        gpus: number of GPUs.
        gpu_bytes: memory of each.
        host_bytes: memory of the host, for everything without a GPU.
    """

    gpus: int | None
    gpu_bytes: float | None
    host_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted memory of a run, held against a machine.

    Attributes:
        request: sizes of the run.
        actors: memory of every kind of process: learner, engine, and those that hold no model.
        complaints: why it does not fit, with numbers; empty where it fits, or nothing is known of the machine.
    """

    request: PlanRequest
    actors: tuple[Memory, ...]
    complaints: tuple[str, ...]


def make_plan(request: PlanRequest, machine: Machine) -> Plan:
    """Predict the memory of every actor and hold it against the machine."""
    learner = learner_memory(request)
    free = machine.host_bytes
    if request.num_gpus_per_engine and (free := machine.gpu_bytes) is not None:
        if request.engine == "vllm":
            free *= request.gpu_memory_utilization
        elif request.colocate:
            free -= learner.kept
    episodes = EPISODE_BYTES * request.max_episodes_in_flight
    actors = (
        learner,
        engine_memory(request, free),
        Memory("driver", 1, False, {"process": PROCESS_BYTES}),
        Memory("env runner", request.num_env_runners, False, {"process": PROCESS_BYTES, "environments": episodes}),
        Memory("object store", 1, False, {"weights on their way": 2 * request.shape.parameters * request.engine_bytes}),
    )
    return Plan(request, actors, tuple(_complaints(request, machine, actors)))


def _complaints(request: PlanRequest, machine: Machine, actors: tuple[Memory, ...]) -> Iterator[str]:
    if machine.gpus is not None and request.gpus > machine.gpus:
        yield (
            f"learners ({request.num_learners} x {request.num_gpus_per_learner:g}) and engines ({request.num_engines} x "
            f"{request.num_gpus_per_engine:g}) ask for {request.gpus:g} GPUs; there are {machine.gpus}"
        )
    if (available := machine.gpu_bytes) is not None:
        learner, engine = actors[:2]
        for actor, other, beside in ((learner, "engine", SLEEPING_ENGINE_BYTES), (engine, "learner", learner.kept)):
            needed = actor.total + beside * request.colocate
            if actor.on_gpu and needed > available:
                shared = f", the {beside / GIB:.1f} that the {other} keeps included" if request.colocate else ""
                yield f"each {actor.actor} needs {needed / GIB:.1f} GiB of a GPU's {available / GIB:.1f}{shared}"
    needed = sum(actor.count * actor.total for actor in actors if not actor.on_gpu)
    if machine.host_bytes is not None and needed > machine.host_bytes:
        yield f"the processes need {needed / GIB:.1f} GiB of the host's {machine.host_bytes / GIB:.1f}"


def nearest_fit(request: PlanRequest, machine: Machine) -> tuple[Plan, list[str]] | None:
    """The plan with the mildest changes that fits, and these as ``key=value`` for ``--set``; ``None`` where none does.

    Another arrangement is the mildest; then come sharding, checkpointing, shorter passes, and adapters in place of all weights.
    """
    limits = [request.max_tokens_per_forward]
    while limits[-1] // 2 >= request.row_tokens:
        limits.append(limits[-1] // 2)
    for rank, limit, checkpointing, sharded, arranged in itertools.product(
        dict.fromkeys((request.lora_rank, request.lora_rank or LORA_RANK)),
        limits,
        dict.fromkeys((request.gradient_checkpointing, True)),
        (False, True),
        _arrangements(request, machine),
    ):
        changed = replace(
            arranged,
            lora_rank=rank,
            num_references=request.num_references if rank == request.lora_rank else 0,
            max_tokens_per_forward=limit,
            gradient_checkpointing=checkpointing,
            sharding="fsdp" if sharded and arranged.num_learners > 1 else arranged.sharding,
        )
        if changed.colocate and machine.gpu_bytes:  # the engine takes no more than the learner leaves, in steps of 5 %
            left = math.floor(20 * (1 - learner_memory(changed).kept / machine.gpu_bytes)) / 20
            share = min(request.gpu_memory_utilization, max(0.05, left))
            changed = replace(changed, gpu_memory_utilization=share)
        plan = make_plan(changed, machine)
        if not plan.complaints:
            return plan, _changes(request, changed)
    return None


def _arrangements(request: PlanRequest, machine: Machine) -> Iterator[PlanRequest]:
    """Ways to lay learners and engines out on the GPUs: as asked for, or taking turns on all of them."""
    if machine.gpus is None or request.gpus <= machine.gpus:
        yield request
    if machine.gpus and request.num_gpus_per_learner and request.num_gpus_per_engine:
        pairs = min(machine.gpus, request.trajectories)
        turns = replace(request, num_gpus_per_learner=0.5, num_gpus_per_engine=0.5, colocate=True)
        yield replace(turns, num_learners=pairs, num_engines=pairs, tensor_parallel_size=1)


def _changes(before: PlanRequest, after: PlanRequest) -> list[str]:
    """Settings that turn one request into the other; references follow from them."""
    in_engine = ("tensor_parallel_size", "gpu_memory_utilization")
    return [
        f"{'engine_kwargs.' if each.name in in_engine else ''}{each.name}={value!r}"
        for each in fields(PlanRequest)
        if each.name != "num_references" and (value := getattr(after, each.name)) != getattr(before, each.name)
    ]


def require_fit(request: PlanRequest, machine: Machine) -> None:
    """Refuse a run whose actors do not fit into their GPUs' memory.

    Raises:
        ConfigError: says what an actor needs, what there is, and what to change.
    """
    plan = make_plan(request, machine)
    if not plan.complaints:
        return
    found = nearest_fit(request, machine)
    advice = f"It would fit with {' '.join(found[1])}." if found else "Take larger GPUs or a smaller model."
    raise ConfigError(
        f"The plan does not fit: {'; '.join(plan.complaints)}. {advice} `trial-ray plan FILE` shows the whole prediction."
    )

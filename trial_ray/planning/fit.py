"""Checks whether a run fits a machine, and finds the smallest changes that make it fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from trial_ray.errors import ConfigError
from trial_ray.planning.memory import (
    DEVICE_CONTEXT_BYTES,
    GIB,
    PROCESS_BYTES,
    Memory,
    PlanRequest,
    engine_memory,
    learner_memory,
)

GPU_HOST_BYTES = 3 * GIB
"""Host memory of a process that computes on a GPU: Python, torch, CUDA's libraries and their kernels. This is an assumption; a
run's ``cost.json`` has the measured peak of every actor."""
SLEEPING_ENGINE_BYTES = 2 * GIB
"""GPU memory that a sleeping engine still uses: CUDA context, kernels, cuBLAS workspaces, and CUDA graphs without their
memory pools, which are offloaded. This is an assumption; vLLM logs the measured number whenever an engine goes to sleep."""
EPISODE_BYTES = 4 * 2**20
"""Memory of one environment in an env runner, including its loaded game."""
ENVIRONMENT_PROCESS_BYTES = 60 * 2**20
"""Memory of one environment's process, without memory shared with other processes; 57 MiB were measured for generated ALFWorld
games of the difficulty ``tiny``."""
LORA_RANK = 32
"""Rank of the LoRA adapters that are proposed if training all weights does not fit."""


@dataclass(frozen=True)
class Machine:
    """Hardware that a run is planned for; an attribute is ``None`` if it is unknown.

    Attributes:
        gpus: number of GPUs.
        gpu_bytes: memory of each GPU.
        host_bytes: memory of the host, for everything that is not on a GPU.
    """

    gpus: int | None
    gpu_bytes: float | None
    host_bytes: float | None = None


@dataclass(frozen=True)
class Plan:
    """Predicted memory of a run, compared with a machine.

    Attributes:
        request: sizes of the run.
        actors: memory of the learner, the engine, processes without a model, the object store, and the host memory of
            processes that use a GPU.
        complaints: reasons why the run does not fit, with numbers; empty if it fits, or if the machine is unknown.
    """

    request: PlanRequest
    actors: tuple[Memory, ...]
    complaints: tuple[str, ...]


def make_plan(request: PlanRequest, machine: Machine) -> Plan:
    """Predict the memory of every actor and compare it with the machine."""
    learner = learner_memory(request)
    free = machine.host_bytes
    if request.num_gpus_per_engine and (free := machine.gpu_bytes) is not None:
        if request.engine == "vllm":
            free *= request.gpu_memory_utilization
        elif request.colocate:
            free -= learner.kept
    episode = ENVIRONMENT_PROCESS_BYTES if request.environment_processes else EPISODE_BYTES
    episodes = episode * request.max_episodes_in_flight
    actors = (
        learner,
        engine_memory(request, free),
        Memory("driver", 1, False, {"process": PROCESS_BYTES}),
        Memory("env runner", request.num_env_runners, False, {"process": PROCESS_BYTES, "environments": episodes}),
        Memory("object store", 1, False, {"weights in transfer": 2 * request.shape.parameters * request.engine_bytes}),
        *_host_parts(request),
    )
    return Plan(request, actors, tuple(_complaints(request, machine, actors)))


def _host_parts(request: PlanRequest) -> Iterator[Memory]:
    """Yield the host memory of the processes that use GPUs."""
    if request.num_gpus_per_learner:
        # Weights are read from their files tensor by tensor, so the host never holds more than the largest tensor.
        largest = request.shape.embedding_parameters * request.model_bytes
        items = {"process": GPU_HOST_BYTES, "a tensor of the files": largest}
        yield Memory("learner's host part", request.num_learners, False, items)
    if request.num_gpus_per_engine:
        number = request.num_engines * request.tensor_parallel_size
        kept: dict[str, float] = {"process": GPU_HOST_BYTES}
        if request.colocate and request.sleep_level == 1:
            kept["weights while it sleeps"] = (
                request.shape.parameters * request.engine_bytes / request.tensor_parallel_size
            )
        yield Memory("engine's host part", number, False, kept)


def _complaints(request: PlanRequest, machine: Machine, actors: tuple[Memory, ...]) -> Iterator[str]:
    if machine.gpus is not None and request.gpus > machine.gpus:
        yield (
            f"learners ({request.num_learners} x {request.num_gpus_per_learner:g}) and engines ({request.num_engines} x "
            f"{request.num_gpus_per_engine:g}) need {request.gpus:g} GPUs; there are {machine.gpus}"
        )
    if (available := machine.gpu_bytes) is not None:
        learner, engine = actors[:2]
        for actor, other, beside in ((learner, "engine", SLEEPING_ENGINE_BYTES), (engine, "learner", learner.kept)):
            needed = actor.total + beside * request.colocate
            if actor.on_gpu and needed > available:
                shared = f", including the {beside / GIB:.1f} that the {other} keeps" if request.colocate else ""
                yield f"each {actor.actor} needs {needed / GIB:.1f} GiB of a GPU's {available / GIB:.1f}{shared}"
    needed = sum(actor.count * actor.total for actor in actors if not actor.on_gpu)
    if machine.host_bytes is not None and needed > machine.host_bytes:
        yield f"the processes need {needed / GIB:.1f} GiB of the host's {machine.host_bytes / GIB:.1f}"


def nearest_fit(request: PlanRequest, machine: Machine) -> tuple[Plan, list[str]] | None:
    """Return the plan that fits with the smallest changes, and the changes as ``key=value`` for ``--set``.

    The result is ``None`` if no plan fits. Changes are tried in this order: another placement on the GPUs, sharding, gradient
    checkpointing, fewer tokens per forward pass, and LoRA adapters instead of all weights.
    """
    limits = [request.max_tokens_per_forward]
    while limits[-1] // 2 >= request.row_tokens:
        limits.append(limits[-1] // 2)
    for rank, limit, checkpointing, sharded, arranged in itertools.product(
        # LoRA adapters cannot be combined with a stale teacher.
        dict.fromkeys((request.lora_rank, request.lora_rank or LORA_RANK * (request.teacher_sync_iterations is None))),
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
        if changed.colocate and machine.gpu_bytes:
            # Limit the engine to the share of the GPU that the learner and the CUDA context leave free, in steps of 5 %.
            left = math.floor(20 * (1 - (learner_memory(changed).kept + DEVICE_CONTEXT_BYTES) / machine.gpu_bytes)) / 20
            share = min(request.gpu_memory_utilization, max(0.05, left))
            changed = replace(changed, gpu_memory_utilization=share)
        plan = make_plan(changed, machine)
        if not plan.complaints:
            return plan, _changes(request, changed)
    return None


def _arrangements(request: PlanRequest, machine: Machine) -> Iterator[PlanRequest]:
    """Yield placements of learners and engines on the GPUs: as requested, or colocated on all GPUs."""
    if machine.gpus is None or request.gpus <= machine.gpus:
        yield request
    can_alternate = not request.max_staleness and request.weight_transfer != "nccl"
    if machine.gpus and request.num_gpus_per_learner and request.num_gpus_per_engine and can_alternate:
        pairs = min(machine.gpus, request.trajectories)
        shared = replace(request, num_gpus_per_learner=0.5, num_gpus_per_engine=0.5, colocate=True)
        if pairs % (request.fsdp_size or 1) == 0:
            yield replace(shared, num_learners=pairs, num_engines=pairs, tensor_parallel_size=1)


def _changes(before: PlanRequest, after: PlanRequest) -> list[str]:
    """Return the settings that differ between two plan requests, as ``key=value`` with the values of ``after``.

    The field ``num_references`` (number of frozen copies of the model) is omitted: it follows from settings, and is not one.
    """
    in_engine = ("tensor_parallel_size", "gpu_memory_utilization")
    return [
        f"{'engine_kwargs.' if field.name in in_engine else ''}{field.name}={value!r}"
        for field in fields(PlanRequest)
        if field.name != "num_references" and (value := getattr(after, field.name)) != getattr(before, field.name)
    ]


def require_fit(request: PlanRequest, machine: Machine) -> None:
    """Reject a run that does not fit the machine.

    Raises:
        ConfigError: the run does not fit; the message contains the needed and available amounts and the changes to make.
    """
    plan = make_plan(request, machine)
    if not plan.complaints:
        return
    fitting = nearest_fit(request, machine)
    advice = f"It would fit with {' '.join(fitting[1])}." if fitting else "Take larger GPUs or a smaller model."
    raise ConfigError(
        f"The plan does not fit: {'; '.join(plan.complaints)}. {advice} `trial-ray plan FILE` shows the whole prediction."
    )

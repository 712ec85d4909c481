"""What a run needs, and whether it fits."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trial_ray.errors import ConfigError
from trial_ray.planning.memory import (
    GIB,
    SLEEPING_ENGINE_BYTES,
    EngineRoom,
    Memory,
    engine_room,
    host_memory,
    learner_memory,
)
from trial_ray.planning.request import PlanRequest
from trial_ray.planning.step_time import Device, StepTime

if TYPE_CHECKING:
    from rich.table import Table

LORA_RANK = 32
"""Rank of the adapters that are proposed where all weights do not fit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to run on.

    Attributes:
        gpus: how many; ``None`` where that does not matter.
        gpu_bytes: memory of each; ``None`` where it is not known.
        host_bytes: memory of the host, on which everything without a GPU lives; ``None`` where it is not known.
    """

    gpus: int | None
    gpu_bytes: float | None
    host_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, and what is wrong with it.

    Attributes:
        request: sizes of the run.
        learner: memory of a learner at its peak.
        engine: memory of an engine, and what its cache holds.
        others: memory of the remaining processes.
        complaints: why it does not fit, with numbers; empty where it fits, or nothing is known of the machine.
    """

    request: PlanRequest
    learner: Memory
    engine: EngineRoom
    others: tuple[Memory, ...]
    complaints: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.complaints

    @property
    def actors(self) -> tuple[Memory, ...]:
        """All of them."""
        return (self.learner, self.engine.memory, *self.others)


def make_plan(request: PlanRequest, machine: Machine) -> Plan:
    """Predict the memory of every actor and hold it against the machine."""
    learner = learner_memory(request)
    engine = engine_room(request, _free_for_engine(request, learner, machine))
    others = tuple(host_memory(request))
    complaints = [
        *_count_complaints(request, machine),
        *_gpu_complaints(request, learner, engine, machine),
        *_host_complaints((learner, engine.memory, *others), machine),
    ]
    return Plan(request, learner, engine, others, tuple(complaints))


def _free_for_engine(request: PlanRequest, learner: Memory, machine: Machine) -> float | None:
    """Bytes of its GPU, or of the host, that an engine may take while it samples."""
    if not request.gpus_per_engine:
        return machine.host_bytes
    if machine.gpu_bytes is None or request.engine == "vllm":
        return None if machine.gpu_bytes is None else request.gpu_memory_utilization * machine.gpu_bytes
    return machine.gpu_bytes - (learner.kept if request.colocated else 0.0)


def _count_complaints(request: PlanRequest, machine: Machine) -> Iterator[str]:
    if machine.gpus is not None and request.gpus > machine.gpus:
        yield (
            f"learners ({request.num_learners} x {request.gpus_per_learner:g}) and engines ({request.num_engines} x "
            f"{request.gpus_per_engine:g}) ask for {request.gpus:g} GPUs; there are {machine.gpus}"
        )


def _gpu_complaints(request: PlanRequest, learner: Memory, engine: EngineRoom, machine: Machine) -> Iterator[str]:
    if (available := machine.gpu_bytes) is None:
        return
    if learner.on_gpu:
        needed = learner.total + (SLEEPING_ENGINE_BYTES if request.colocated else 0)
        if needed > available:
            beside = ", the engine asleep beside it included" if request.colocated else ""
            yield f"a learner needs {needed / GIB:.1f} GiB of a GPU's {available / GIB:.1f}{beside}"
    if engine.memory.on_gpu:
        kept = learner.kept if request.colocated else 0.0
        needed = engine.memory.total + kept
        if needed > available:
            with_learner = f", the {kept / GIB:.1f} that the learner keeps included" if kept else ""
            yield f"an engine needs {needed / GIB:.1f} GiB of a GPU's {available / GIB:.1f}{with_learner}"


def _host_complaints(actors: tuple[Memory, ...], machine: Machine) -> Iterator[str]:
    if machine.host_bytes is None:
        return
    needed = sum(actor.count * actor.total for actor in actors if not actor.on_gpu)
    if needed > machine.host_bytes:
        yield f"the processes need {needed / GIB:.1f} GiB of the host's {machine.host_bytes / GIB:.1f}"


# -- what to change ----------------------------------------------------------------------------------------------------


def nearest_fit(request: PlanRequest, machine: Machine) -> tuple[Plan, list[str]] | None:
    """The plan with the fewest and mildest changes that fits, and these changes as settings; ``None`` where none does."""
    candidates = sorted(_candidates(request, machine), key=lambda candidate: candidate[0])
    for _, changed in candidates:
        plan = make_plan(changed, machine)
        if plan.fits:
            return plan, describe_changes(request, changed)
    return None


def _candidates(request: PlanRequest, machine: Machine) -> Iterator[tuple[int, PlanRequest]]:
    """Changed requests with what each change costs: an arrangement is free, adapters in place of all weights cost most."""
    tokens = [request.max_tokens_per_forward]
    while tokens[-1] // 2 >= request.row_tokens:
        tokens.append(tokens[-1] // 2)
    for arrangement, sharded, checkpointing, (halvings, limit), adapters in itertools.product(
        _arrangements(request, machine), (False, True), (False, True), enumerate(tokens), (False, True)
    ):
        changed = replace(
            arrangement,
            sharded=arrangement.sharded or (sharded and arrangement.num_learners > 1),
            gradient_checkpointing=request.gradient_checkpointing or checkpointing,
            max_tokens_per_forward=limit,
            lora_rank=LORA_RANK if adapters and not request.lora_rank else request.lora_rank,
            num_references=0 if adapters else request.num_references,
        )
        yield sharded + 2 * checkpointing + 2 * halvings + 20 * adapters, _with_room(changed, machine)


def _with_room(request: PlanRequest, machine: Machine) -> PlanRequest:
    """Where engine and learner share a GPU, the engine takes no more than the learner leaves, in steps of 5 %."""
    if not (request.colocated and machine.gpu_bytes):
        return request
    left = 1 - learner_memory(request).kept / machine.gpu_bytes
    share = max(0.05, math.floor(20 * left) / 20)
    return replace(request, gpu_memory_utilization=min(request.gpu_memory_utilization, share))


def _arrangements(request: PlanRequest, machine: Machine) -> Iterator[PlanRequest]:
    """Ways to lay learners and engines out on the GPUs: as asked for, taking turns on all of them, or half of them each."""
    gpus = machine.gpus
    if gpus is None or not request.gpus or request.gpus <= gpus:
        yield request
    if gpus is None or not (request.gpus_per_learner and request.gpus_per_engine):
        return
    learners = min(gpus, request.trajectories)
    shared = replace(request, num_learners=learners, num_engines=learners, tensor_parallel=1, colocated=True)
    yield replace(shared, gpus_per_learner=0.5, gpus_per_engine=0.5)
    half = gpus // 2
    split = 1
    while split <= half:
        yield replace(
            request,
            num_learners=half,
            num_engines=half // split,
            gpus_per_learner=1,
            gpus_per_engine=split,
            tensor_parallel=split,
            colocated=False,
        )
        split *= 2


def describe_changes(before: PlanRequest, after: PlanRequest) -> list[str]:
    """Calls on a config that turn one request into the other."""
    learners, engines = [], []
    if after.num_learners != before.num_learners or after.gpus_per_learner != before.gpus_per_learner:
        learners = [f"num_learners={after.num_learners}", f"num_gpus_per_learner={after.gpus_per_learner:g}"]
    if after.colocated and not before.colocated:
        engines.append("colocate=True")
    if after.num_engines != before.num_engines or after.gpus_per_engine != before.gpus_per_engine:
        engines += [f"num_engines={after.num_engines}", f"num_gpus_per_engine={after.gpus_per_engine:g}"]
    keywords: dict[str, float] = {}
    if after.tensor_parallel != before.tensor_parallel:
        keywords["tensor_parallel_size"] = after.tensor_parallel
    if after.gpu_memory_utilization != before.gpu_memory_utilization:
        keywords["gpu_memory_utilization"] = after.gpu_memory_utilization
    if keywords:
        engines.append(f"engine_kwargs={json.dumps(keywords)}")
    policy = []
    if after.lora_rank != before.lora_rank:
        policy.append(f"lora_rank={after.lora_rank}")
    if after.sharded and not before.sharded:
        policy.append('sharding="fsdp"')
    if after.gradient_checkpointing and not before.gradient_checkpointing:
        policy.append("gradient_checkpointing=True")
    training = []
    if after.max_tokens_per_forward != before.max_tokens_per_forward:
        training.append(f"max_tokens_per_forward={after.max_tokens_per_forward}")
    sections = {"learners": learners, "engines": engines, "policy": policy, "training": training}
    return [f".{name}({', '.join(settings)})" for name, settings in sections.items() if settings]


def require_fit(request: PlanRequest, machine: Machine) -> None:
    """Refuse a run whose actors do not fit into their GPUs' memory.

    Raises:
        ConfigError: says what an actor needs, what there is, and what to change.
    """
    plan = make_plan(request, machine)
    if plan.fits:
        return
    found = nearest_fit(request, machine)
    advice = (
        f"It would fit with {' '.join(found[1])}." if found and found[1] else "Take larger GPUs or a smaller model."
    )
    raise ConfigError(
        f"The plan does not fit: {'; '.join(plan.complaints)}. {advice} `trial-ray plan FILE` shows the whole prediction."
    )


def memory_table(plan: Plan, machine: Machine) -> Table:
    """What each kind of actor holds at its peak."""
    from rich.table import Table

    request = plan.request
    title = f"memory of each actor at its peak: {request.shape.parameters / 1e6:,.0f} million parameters, "
    title += f"{request.gpus:g} GPU{'s' if request.gpus != 1 else ''}" if request.gpus else "no GPU"
    if machine.gpu_bytes and request.gpus:
        title += f" of {machine.gpu_bytes / GIB:.0f} GiB"
    table = Table(title=title, title_justify="left")
    table.add_column("actor")
    table.add_column("number", justify="right")
    table.add_column("where")
    table.add_column("GiB", justify="right")
    table.add_column("of it")
    for actor in plan.actors:
        where = "GPU" if actor.on_gpu else "host"
        table.add_row(actor.actor, str(actor.count), where, f"{actor.total / GIB:.1f}", _parts(actor))
    return table


def _parts(actor: Memory) -> str:
    parts = sorted(((size, name) for name, size in actor.items.items() if size >= 0.05 * GIB), reverse=True)
    return ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts)


def time_table(time: StepTime, device: Device) -> Table:
    """Seconds of an iteration, in phases one after the other."""
    from rich.table import Table

    title = f"an iteration of {time.row_tokens:,.0f} tokens, at the speed of {device.name}"
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name in ("sampling", "scoring", "update", "sync"):
        seconds = getattr(time, name)
        table.add_row(name, f"{seconds:,.1f}", f"{seconds / time.total:.0%}")
    table.add_row("iteration", f"{time.total:,.1f}", "")
    return table


def verdict(plan: Plan, found: tuple[Plan, list[str]] | None) -> str:
    """Whether the plan fits, and if not, why and what to change."""
    if plan.fits:
        cache = f"an engine's cache holds {plan.engine.sequences:,.0f} requests of full length"
        return f"fits; {cache}"
    lines = ["does not fit:", *(f"  {complaint}" for complaint in plan.complaints)]
    if found is None:
        return "\n".join(
            [*lines, "no arrangement, sharding, checkpointing or adapter makes it fit: take larger or more GPUs"]
        )
    return "\n".join([*lines, "it would fit with", *(f"  {change}" for change in found[1])])

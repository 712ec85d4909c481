"""Whether a run fits on a machine, and the smallest change of its settings with which it would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trial_ray.errors import ConfigError
from trial_ray.planning.memory import GIB, Memory, PlanRequest, engine_memory, host_memory, learner_memory

SLEEPING_ENGINE_BYTES = 1 * GIB
"""Memory of a GPU that a sleeping engine keeps: context and compiled graphs."""
LORA_RANK = 32
"""Rank of the adapters that are proposed where all weights do not fit."""
CHANGED = {
    "learners": ("num_learners", "num_gpus_per_learner"),
    "engines": ("colocate", "num_engines", "num_gpus_per_engine"),
    "policy": ("lora_rank", "sharding", "gradient_checkpointing"),
    "training": ("max_tokens_per_forward",),
}
"""Settings that a proposal may change, by config group; ``engine_kwargs`` of :data:`CHANGED_KWARGS` beside them."""
CHANGED_KWARGS = ("tensor_parallel_size", "gpu_memory_utilization")


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
        learner: memory of a learner at its peak.
        engine: memory of an engine.
        others: memory of the remaining processes.
        complaints: why it does not fit, with numbers; empty where it fits, or nothing is known of the machine.
    """

    request: PlanRequest
    learner: Memory
    engine: Memory
    others: tuple[Memory, ...]
    complaints: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether there is no complaint."""
        return not self.complaints

    @property
    def actors(self) -> tuple[Memory, ...]:
        """Memory of every kind of process."""
        return (self.learner, self.engine, *self.others)


def make_plan(request: PlanRequest, machine: Machine) -> Plan:
    """Predict the memory of every actor and hold it against the machine."""
    learner = learner_memory(request)
    free = machine.host_bytes
    if request.num_gpus_per_engine and (free := machine.gpu_bytes) is not None:
        if request.engine == "vllm":
            free *= request.gpu_memory_utilization
        elif request.colocate:
            free -= learner.kept
    engine, others = engine_memory(request, free), host_memory(request)
    complaints = _complaints(request, machine, (learner, engine, *others))
    return Plan(request, learner, engine, others, tuple(complaints))


def _complaints(request: PlanRequest, machine: Machine, actors: tuple[Memory, ...]) -> Iterator[str]:
    if machine.gpus is not None and request.gpus > machine.gpus:
        yield (
            f"learners ({request.num_learners} x {request.num_gpus_per_learner:g}) and engines ({request.num_engines} x "
            f"{request.num_gpus_per_engine:g}) ask for {request.gpus:g} GPUs; there are {machine.gpus}"
        )
    if (available := machine.gpu_bytes) is not None:
        learner, engine = actors[:2]
        kept = learner.kept / GIB
        for actor, name, beside, words in (
            (learner, "a learner", SLEEPING_ENGINE_BYTES, ", the engine asleep beside it included"),
            (engine, "an engine", learner.kept, f", the {kept:.1f} that the learner keeps included"),
        ):
            needed = actor.total + (beside if request.colocate else 0)
            if actor.on_gpu and needed > available:
                included = words if request.colocate else ""
                yield f"{name} needs {needed / GIB:.1f} GiB of a GPU's {available / GIB:.1f}{included}"
    if machine.host_bytes is not None:
        needed = sum(actor.count * actor.total for actor in actors if not actor.on_gpu)
        if needed > machine.host_bytes:
            yield f"the processes need {needed / GIB:.1f} GiB of the host's {machine.host_bytes / GIB:.1f}"


def nearest_fit(request: PlanRequest, machine: Machine) -> tuple[Plan, list[str]] | None:
    """The plan with the fewest and mildest changes that fits, and these changes as settings; ``None`` where none does."""
    for _, changed in sorted(_candidates(request, machine), key=lambda candidate: candidate[0]):
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
            sharding="fsdp" if sharded and arrangement.num_learners > 1 else arrangement.sharding,
            gradient_checkpointing=request.gradient_checkpointing or checkpointing,
            max_tokens_per_forward=limit,
            lora_rank=LORA_RANK if adapters and not request.lora_rank else request.lora_rank,
            num_references=0 if adapters else request.num_references,
        )
        if changed.colocate and machine.gpu_bytes:  # the engine takes no more than the learner leaves, in steps of 5 %
            left = math.floor(20 * (1 - learner_memory(changed).kept / machine.gpu_bytes)) / 20
            share = min(request.gpu_memory_utilization, max(0.05, left))
            changed = replace(changed, gpu_memory_utilization=share)
        yield sharded + 2 * checkpointing + 2 * halvings + 20 * adapters, changed


def _arrangements(request: PlanRequest, machine: Machine) -> Iterator[PlanRequest]:
    """Ways to lay learners and engines out on the GPUs: as asked for, taking turns on all of them, or half of them each."""
    gpus = machine.gpus
    if gpus is None or not request.gpus or request.gpus <= gpus:
        yield request
    if gpus is None or not (request.num_gpus_per_learner and request.num_gpus_per_engine):
        return

    def layout(learners: int, per_learner: float, engines: int, per_engine: float, split: int = 1) -> PlanRequest:
        return replace(
            request,
            num_learners=learners,
            num_gpus_per_learner=per_learner,
            num_engines=engines,
            num_gpus_per_engine=per_engine,
            tensor_parallel_size=split,
            colocate=per_learner < 1,
        )

    pairs = min(gpus, request.trajectories)
    yield layout(pairs, 0.5, pairs, 0.5)
    half, split = gpus // 2, 1
    while split <= half:
        yield layout(half, 1, half // split, split, split)
        split *= 2


def describe_changes(before: PlanRequest, after: PlanRequest) -> list[str]:
    """Calls on a config that turn one request into the other."""

    def changed(names: tuple[str, ...]) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(after, name)) != getattr(before, name)}

    calls = []
    for group, names in CHANGED.items():
        settings = changed(names)
        if group == "engines" and (keywords := changed(CHANGED_KWARGS)):
            settings["engine_kwargs"] = keywords
        if settings:
            calls.append(f".{group}({', '.join(f'{name}={value!r}' for name, value in settings.items())})")
    return calls


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

"""``trial-ray plan FILE``: estimates the memory and step time of a run before it is started."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING

from trial_ray.cli.console import ENV_ADAPTER, FAILED, FILE, SET, command, option, positive, print_table
from trial_ray.cli.train import resolve_config
from trial_ray.errors import ConfigError
from trial_ray.runs.experiment import load_experiment
from trial_ray.runs.terminal import show

if TYPE_CHECKING:
    from trial_ray.planning.fit import Machine, Plan
    from trial_ray.planning.memory import PlanRequest
    from trial_ray.planning.time import Device

DEFAULT_GPU_GIB = 80


@command(
    "estimate the memory and step time of a run",
    """examples:
  trial-ray plan alfworld_quickstart
  trial-ray plan tuned_examples/alfworld_qwen3_1.7b.py --gpus 8 --gpu-memory 80
  trial-ray plan FILE --gpus 1 --gpu-memory 80 --set gradient_checkpointing=True

Nothing is started and no weights are fetched. If the run does not fit, the smallest change that makes it fit is printed
with its memory, and the exit code is 1. docs/scaling.md explains the prediction.
""",
    option("--gpus", "number of GPUs (default: as many as the experiment requests)", "N", positive),
    option("--gpu-memory", "memory of each, in GiB (default: the memory of the GPUs here, else 80)", "GiB", float),
    FILE,
    ENV_ADAPTER,
    SET,
)
def plan(args: Namespace) -> int | None:
    """Predict memory and step time, and print them."""
    from trial_ray.planning.fit import make_plan, nearest_fit
    from trial_ray.planning.memory import PlanRequest

    if args.gpu_memory is not None and not args.gpu_memory > 0:
        raise ConfigError(f"--gpu-memory is {args.gpu_memory:g}, expected a number of GiB above 0.")
    config = resolve_config(load_experiment(args.file).config, None, None, args.overrides, args.env_adapters)
    config.validate()
    request = PlanRequest.of(config)
    machine, device = _machine(args, request)
    requested = make_plan(request, machine)
    _show(requested, machine, device)
    if not requested.complaints:
        show(f"fits; an engine's cache holds {requested.actors[1].rows:,.0f} requests of full length")
        return None
    show("\n  ".join(["does not fit:", *requested.complaints]))
    fitting = nearest_fit(request, machine)
    if fitting is None:
        show("no arrangement, sharding, checkpointing or adapter makes it fit: take larger or more GPUs")
    else:
        show("\n  --set ".join(["it would fit with", *fitting[1]]))
        _show(fitting[0], machine, device)
    return FAILED


def _machine(args: Namespace, request: PlanRequest) -> tuple[Machine, Device]:
    """Return the machine and the device to plan for.

    If the run requests no GPU, the device is this machine's CPU. Otherwise, the memory of each GPU is ``--gpu-memory``, else that
    of this machine's smallest GPU, else 80 GiB.
    """
    import psutil
    import torch

    from trial_ray.models.module import matmul_rate
    from trial_ray.planning.fit import Machine
    from trial_ray.planning.time import HOST_BANDWIDTH, Device, gpu_like, installed_gpus

    if args.gpu_memory and not request.gpus:
        raise ConfigError(
            "--gpu-memory is the memory of each GPU, and the experiment requests none: leave it out, or give "
            "--set num_gpus_per_learner=1 --set num_gpus_per_engine=1."
        )
    if not request.gpus:
        memory, rate = psutil.virtual_memory().total, matmul_rate("cpu", torch.float32)
        cpu = Device(f"this CPU ({rate / 1e9:,.0f} GFLOP/s, measured)", rate, HOST_BANDWIDTH, memory / 2**30)
        return Machine(args.gpus, None, memory), cpu
    gpus = [] if args.gpu_memory else installed_gpus()[0]
    smallest = min(gpus, key=lambda gpu: gpu.mib, default=None)
    gib = smallest.mib / 1024 if smallest else args.gpu_memory or DEFAULT_GPU_GIB
    return Machine(args.gpus or math.ceil(request.gpus), gib * 2**30), gpu_like(gib, smallest.name if smallest else "")


def _show(plan: Plan, machine: Machine, device: Device) -> None:
    """Print the peak memory of each kind of actor, and the seconds of each phase of an iteration."""
    from trial_ray.planning import time

    request, gib = plan.request, 2**30
    title = f"memory of each actor at its peak: {request.shape.parameters / 1e6:,.0f} million parameters, "
    title += f"{request.gpus:g} GPU{'s' if request.gpus != 1 else ''}" if request.gpus else "no GPU"
    if machine.gpu_bytes and request.gpus:
        title += f" of {machine.gpu_bytes / gib:.0f} GiB"
    rows = []
    for actor in plan.actors:
        parts = sorted(((size, name) for name, size in actor.items.items() if size >= 0.05 * gib), reverse=True)
        listed = ", ".join(f"{name} {size / gib:.1f}" for size, name in parts)
        rows.append((actor.actor, actor.count, "GPU" if actor.on_gpu else "host", f"{actor.total / gib:.1f}", listed))
    print_table(title, ("actor", ">number", "where", ">GiB", "of it"), rows)
    phases, tokens = time.step_time(request, device)
    total, (fastest, slowest) = sum(phases.values()), time.iteration_range(phases)
    title = f"an iteration of {tokens:,.0f} tokens, at the speed of {device.name}"
    shares = (
        (name, f"{seconds:,.1f}", f"{seconds / total:.0%}") for name, seconds in {**phases, "iteration": total}.items()
    )
    print_table(title, ("phase", ">seconds", ">share"), shares, min_width=len(title))
    show(
        f"estimated, not measured: the learner at {time.LEARNER_SHARE:.0%} of the peak; "
        f"with {time.MAX_LEARNER_SHARE:.0%} to {time.MIN_LEARNER_SHARE:.0%} an iteration takes {fastest:,.0f} to {slowest:,.0f} s. "
        "Lengths and sampling are assumptions, too"
    )

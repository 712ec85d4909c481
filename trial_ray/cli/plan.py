"""``trial-ray plan FILE``: what a run would need, before anything is rented or started."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trial_ray.cli import console as terminal
from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.planning.fit import Machine, Plan
    from trial_ray.planning.memory import PlanRequest
    from trial_ray.planning.time import Device

DEFAULT_GPU_GIB = 80

HELP = "memory and time that a run would need"
EPILOG = """examples:
  trial-ray plan alfworld_quickstart
  trial-ray plan tuned_examples/alfworld_qwen3_1.7b.py --gpus 8 --gpu-memory 80
  trial-ray plan FILE --gpus 1 --gpu-memory 80 --set gradient_checkpointing=True

Nothing is started and no weights are fetched. Where the run does not fit, the smallest change with which it would is printed,
with what it then needs, and the exit code is 1. docs/scaling.md says what the prediction is made of.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--gpus", type=terminal.positive, metavar="N", help="GPUs that there are (default: as many as asked for)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of each, in GiB (default: that of the GPUs here, else 80)",
    )
    terminal.add_options(parser, "file", "--env-adapter", "--set")
    terminal.add_removed(
        parser, "--simulate", "read the phases that plan prints, and cost.json of the first iterations"
    )


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    from trial_ray.cli.train import resolve_config
    from trial_ray.planning.fit import make_plan, nearest_fit
    from trial_ray.planning.memory import PlanRequest
    from trial_ray.planning.time import step_time
    from trial_ray.runs.experiment import load_experiment

    if args.gpu_memory is not None and not args.gpu_memory > 0:
        raise ConfigError(f"--gpu-memory is {args.gpu_memory:g}, expected a number of GiB above 0.")
    config = resolve_config(load_experiment(args.file).config, None, None, args.overrides, args.env_adapters)
    config.validate()
    request = PlanRequest.of(config)
    machine, device = _machine(args, request)
    plan = make_plan(request, machine)
    found = nearest_fit(request, machine) if plan.complaints else None
    console = terminal.output()
    for shown in (plan, found[0]) if found else (plan,):
        console.print(_memory_table(shown, machine))
        phases, tokens = step_time(shown.request, device)
        console.print(_time_table(phases, tokens, device))
        terminal.show(_uncertainty(shown.request, phases, device))
        if shown is plan:
            terminal.show(_verdict(plan, found))
    return terminal.FAILED if plan.complaints else terminal.DONE


def _machine(args: argparse.Namespace, request: PlanRequest) -> tuple[Machine, Device]:
    """The named machine, else this one; a run that asks for GPUs where there are none is planned for 80 GiB."""
    import psutil
    import torch

    from trial_ray.models.module import matmul_rate
    from trial_ray.planning.fit import Machine
    from trial_ray.planning.time import HOST_BANDWIDTH, Device, gpu_like, installed_gpus

    if not request.gpus:
        memory, rate = psutil.virtual_memory().total, matmul_rate("cpu", torch.float32)
        cpu = Device(f"this CPU ({rate / 1e9:,.0f} GFLOP/s, measured)", rate, HOST_BANDWIDTH, memory / 2**30)
        return Machine(args.gpus, None, memory), cpu
    gpus = [] if args.gpu_memory else installed_gpus()[0]
    smallest = min(gpus, key=lambda gpu: gpu.mib, default=None)
    gib = smallest.mib / 1024 if smallest else args.gpu_memory or DEFAULT_GPU_GIB
    return Machine(args.gpus, gib * 2**30), gpu_like(gib, smallest.name if smallest else "")


def _memory_table(plan: Plan, machine: Machine) -> Table:
    """Memory of each kind of actor at its peak."""
    from rich.table import Table

    request, gib = plan.request, 2**30
    title = f"memory of each actor at its peak: {request.shape.parameters / 1e6:,.0f} million parameters, "
    title += f"{request.gpus:g} GPU{'s' if request.gpus != 1 else ''}" if request.gpus else "no GPU"
    if machine.gpu_bytes and request.gpus:
        title += f" of {machine.gpu_bytes / gib:.0f} GiB"
    table = Table("actor", "number", "where", "GiB", "of it", title=title, title_justify="left")
    table.columns[1].justify = table.columns[3].justify = "right"
    for actor in plan.actors:
        parts = sorted(((size, name) for name, size in actor.items.items() if size >= 0.05 * gib), reverse=True)
        words = ", ".join(f"{name} {size / gib:.1f}" for size, name in parts)
        where = "GPU" if actor.on_gpu else "host"
        table.add_row(actor.actor, str(actor.count), where, f"{actor.total / gib:.1f}", words)
    return table


def _time_table(phases: dict[str, float], tokens: float, device: Device) -> Table:
    """Seconds of an iteration, in phases one after the other."""
    from rich.table import Table

    title = f"an iteration of {tokens:,.0f} tokens, at the speed of {device.name}"
    table = Table("phase", "seconds", "share", title=title, title_justify="left", min_width=len(title))
    table.columns[1].justify = table.columns[2].justify = "right"
    total = sum(phases.values())
    for name, seconds in {**phases, "iteration": total}.items():
        table.add_row(name, f"{seconds:,.1f}", f"{seconds / total:.0%}")
    return table


def _uncertainty(request: PlanRequest, phases: dict[str, float], device: Device) -> str:
    """How far the time may be off, as far as the learner's share of the peak goes."""
    from trial_ray.planning.time import LEAST_SHARE, MOST_SHARE, ROOFLINE_SHARE, iteration_range, learner_share

    least, most = iteration_range(phases)
    return (
        f"estimated, not measured: the update uses {learner_share(request, device):.0%} of the peak if kernels reach "
        f"{ROOFLINE_SHARE:.0%} of the roofline; with {MOST_SHARE:.0%} to {LEAST_SHARE:.0%} an iteration takes "
        f"{least:,.0f} to {most:,.0f} s. Lengths and sampling are assumptions, too"
    )


def _verdict(plan: Plan, found: tuple[Plan, list[str]] | None) -> str:
    """Whether the plan fits, and if not, why and what to change."""
    if not plan.complaints:
        return f"fits; an engine's cache holds {plan.actors[1].rows:,.0f} requests of full length"
    lines = ["does not fit:", *(f"  {complaint}" for complaint in plan.complaints)]
    if found is None:
        lines.append("no arrangement, sharding, checkpointing or adapter makes it fit: take larger or more GPUs")
    else:
        lines += ["it would fit with", *(f"  --set {change}" for change in found[1])]
    return "\n".join(lines)


PLAN = terminal.Command(HELP, EPILOG, add_arguments, run)

"""A plan for a person: memory by actor, time by phase, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trial_ray.planning.memory import GIB, Memory
from trial_ray.planning.plan import Machine, Plan
from trial_ray.planning.step_time import Device, StepTime

if TYPE_CHECKING:
    from rich.table import Table


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

"""``trial-ray plan FILE --simulate``: what is simulated, and how it is shown."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal
from trial_ray.errors import ConfigError

if TYPE_CHECKING:
    from trial_ray.config.run import RunSettings
    from trial_ray.planning.request import PlanRequest
    from trial_ray.planning.scale import Point, Scaling
    from trial_ray.planning.simulation import SimulatedRun
    from trial_ray.planning.step_time import Device

ITERATIONS = 3
NODE_HOURS = 6300.0
"""Mean hours between two failures of a node: 419 in 54 days of 2,048 nodes in the training of Llama 3 (its report, 2024)."""
LARGEST = 4096
DAY_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the simulation's arguments."""
    options = parser.add_argument_group("simulation")
    options.add_argument(
        "--simulate", action="store_true", help="simulate iterations with all actors, and losses of nodes"
    )
    options.add_argument(
        "--recorded",
        type=Path,
        metavar="RUN",
        help="run folder whose lengths and speeds are taken (default: the plan's assumptions)",
    )
    options.add_argument(
        "--price", type=float, metavar="USD", help="price of a GPU hour, for the cost of 1,000 episodes"
    )
    options.add_argument(
        "--node-hours",
        type=float,
        default=NODE_HOURS,
        metavar="H",
        help=f"mean hours between two losses of a node, {NODE_HOURS:,.0f} by default; on spot machines perhaps 24",
    )
    options.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    options.add_argument(
        "--picture", type=Path, metavar="FILE", help=f"draw 1 to {LARGEST:,} GPUs into a PNG or SVG file"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def check_arguments(args: argparse.Namespace) -> None:
    """Check the simulation's arguments.

    Raises:
        ConfigError: a number is out of range, or an option has no effect.
    """
    for name in ("price", "node_hours"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}, expected a finite number above 0.")
    given = [f"--{name}" for name in ("recorded", "price", "picture", "json") if getattr(args, name) is not None]
    if given and not args.simulate:
        raise ConfigError(f"{', '.join(given)} need{'s' if len(given) == 1 else ''} --simulate.")
    if args.picture is not None and args.picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture is {str(args.picture)!r}, expected a name that ends in .png or .svg.")


def run(args: argparse.Namespace, config: RunSettings, request: PlanRequest, device: Device) -> None:
    """Simulate, print, and write files."""
    from trial_ray.files import finite, write_json
    from trial_ray.planning.scale import points

    scaling = _scaling(args, config, request, device)
    console = terminal.output()
    record: dict[str, Any] = {"rates": asdict(scaling.rates), "node_hours": args.node_hours, "seed": args.seed}
    if not request.gpus:
        if args.gpus is not None or args.picture is not None:
            points(scaling, 1)  # says why not
        from trial_ray.planning.simulation import simulate

        simulated = simulate(scaling.workload, scaling.arrangement, scaling.rates, scaling.iterations, scaling.seed)
        _show_columns(console, {"as configured": _figures(simulated)}, "an iteration, simulated")
        record["run"] = asdict(simulated)
    else:
        gpus = args.gpus or math.ceil(request.gpus)
        found = points(scaling, gpus)
        if not found:
            raise ConfigError(f"{gpus} GPU{'s' * (gpus > 1)} cannot hold an engine and a learner; take more.")
        _show_points(console, scaling, found, args.price)
        record["points"] = [_point_record(each, args.price) for each in found]
        if args.picture is not None:
            record["curve"] = _draw(scaling, args)
    if args.json is not None:
        write_json(args.json, finite(record))
        terminal.show(f"written: {args.json}")


def _scaling(args: argparse.Namespace, config: RunSettings, request: PlanRequest, device: Device) -> Scaling:
    from trial_ray.planning.calibration import fit_rates
    from trial_ray.planning.rates import Arrangement, Workload
    from trial_ray.planning.scale import Scaling, device_rates
    from trial_ray.runs.recorded_workload import recorded_run

    if args.recorded is not None:
        recorded = recorded_run(args.recorded)
        workload, rates = recorded.workload, fit_rates(recorded, args.seed)
    else:
        workload = Workload.assumed(request, args.seed)
        rates = device_rates(request, device, workload)
    arrangement = Arrangement.of(config, os.cpu_count() or 1)
    return Scaling(request, workload, arrangement, rates, ITERATIONS, args.node_hours * 3600, args.seed)


def _figures(run: SimulatedRun) -> dict[str, str]:
    """The mean iteration in words; the first of several is left out, since engines are empty when it begins."""
    counted = run.iterations[1:] or run.iterations

    def mean(name: str) -> float:
        return float(sum(getattr(each, name) for each in counted) / len(counted))

    seconds = ("sampling", "scoring", "update", "sync", "other", "seconds")
    names = {"update": "update, scoring included", "sync": "weight sync", "seconds": "iteration"}
    busy = ("engines", "learners", "env_runners")
    return {
        **{f"{names.get(name, name)}, s": f"{mean(name):,.4g}" for name in seconds},
        **{f"idle: {name.replace('_', ' ')}": f"{1 - mean(f'{name}_busy'):.0%}" for name in busy},
        "staleness, versions": f"{mean('staleness'):.2f}",
    }


def _show_points(console: Any, scaling: Scaling, found: Sequence[Point], price: float | None) -> None:
    from trial_ray.planning.reliability import young_daly_s
    from trial_ray.planning.scale import limit, loss_cost

    columns, losses = {}, {}
    for each in found:
        arranged = each.arrangement
        columns[each.kind] = {
            "GPUs": f"{each.gpus:,}",
            "engines, learners, env runners": f"{arranged.engines:,}, {arranged.learners:,}, {arranged.env_runners:,}",
            **_figures(each.run),
            "limited by": limit(scaling, each),
            "GPU hours of 1,000 episodes": f"{each.gpu_hours_per_1000:,.3g}",
            **({"cost of 1,000 episodes, USD": f"{each.gpu_hours_per_1000 * price:,.2f}"} if price else {}),
        }
        long, faults = each.losses, each.faults
        per_day = faults.losses_per_s * DAY_S
        in_flight = arranged.tasks * (1 + arranged.max_staleness)
        nodes = faults.learner_nodes + faults.engine_nodes
        engine, runner = (loss_cost(scaling, each, kind) for kind in ("engine", "env runner"))
        losses[each.kind] = {
            "nodes lost a day": f"{per_day:,.3g}",
            "groups started again a day": f"{per_day * in_flight / nodes:,.3g}",
            "iteration with losses, s": f"{long.iteration_s:,.4g}" if not long.given_up else "never ends",
            "of it work done again": f"{long.repeated_s / long.seconds:.1%}",
            "of it waiting": f"{long.waiting_s / long.seconds:.1%}",
            "best checkpoint interval, iterations": f"{each.checkpoint_every:,}",
            "by Young's sqrt(2 C M)": f"{young_daly_s(faults) / each.iteration_s:,.3g}",
            "one engine lost in sampling, s": f"{engine.seconds:,.3g} ({engine.requests:,.3g} requests again)",
            "one env runner lost in sampling, s": f"{runner.seconds:,.3g} ({runner.groups:,.3g} groups again)",
        }
    _show_columns(console, columns, "an iteration, simulated without losses of nodes")
    _show_columns(console, losses, f"with a loss every {scaling.node_mtbf_s / 3600:,.0f} hours of a node")


def _show_columns(console: Any, columns: Mapping[str, Mapping[str, str]], title: str) -> None:
    from rich.table import Table

    table = Table("", *columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in next(iter(columns.values())):
        table.add_row(name, *(column[name] for column in columns.values()))
    console.print(table)


def _draw(scaling: Scaling, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Simulate all numbers of GPUs, draw them, and say where more of them stop helping."""
    from trial_ray.planning.scale import KINDS, knee, limit, points
    from trial_ray.reports.scaling_plot import ScalingPoint, plot_scaling

    sizes = [2**power for power in range(LARGEST.bit_length())]
    found = [each for size in sizes for each in points(scaling, size)]
    by_kind = {kind: [each for each in found if each.kind == kind] for kind in KINDS}
    knees = {kind: knee(each) for kind, each in by_kind.items()}
    limits = {kind: limit(scaling, at) for kind, at in knees.items() if at is not None}
    lines = {
        kind: [
            ScalingPoint(
                each.gpus,
                each.losses.iteration_s,
                each.gpu_hours_per_1000,
                limits[kind] if each is knees[kind] else "",
            )
            for each in of_kind
        ]
        for kind, of_kind in by_kind.items()
    }
    arranged = scaling.arrangement
    title = f"{Path(args.file).stem}: {arranged.tasks} groups of {arranged.group_size}, "
    title += f"a node lost every {args.node_hours:,.0f} hours (simulated)"
    plot_scaling(lines, title, args.picture)
    for kind, at in knees.items():
        said = f"stop helping at {at.gpus:,} GPUs, limited by {limits[kind]}" if at else "always help"
        terminal.show(f"{kind}: twice as many GPUs {said}")
    terminal.show(f"drawn: {args.picture}")
    return {kind: [_point_record(each, args.price) for each in of_kind] for kind, of_kind in by_kind.items()}


def _point_record(point: Point, price: float | None) -> dict[str, Any]:
    hours = point.gpu_hours_per_1000
    return {
        **asdict(point),
        "iteration_s": point.iteration_s,
        "iteration_with_losses_s": point.losses.iteration_s,
        "gpu_hours_per_1000": hours,
        "cost_per_1000": None if price is None else price * hours,
    }

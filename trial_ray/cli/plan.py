"""``trial-ray plan FILE``: what a run would need, before anything is rented or started."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal
from trial_ray.errors import ConfigError
from trial_ray.runs.experiment import experiment_file

if TYPE_CHECKING:
    from trial_ray.planning.plan import Machine
    from trial_ray.planning.request import PlanRequest
    from trial_ray.planning.step_time import Device

DEFAULT_GPU_GIB = 80

EPILOG = """examples:
  trial-ray plan alfworld_quickstart
  trial-ray plan tuned_examples/alfworld_qwen3_1.7b.py --gpus 8 --gpu-memory 80
  trial-ray plan FILE --gpus 1 --gpu-memory 80 --set gradient_checkpointing=True

Nothing is started and no weights are fetched. Where the run does not fit, the smallest change with which it would is printed,
with what it then needs, and the exit code is 1. docs/scaling.md says what the prediction is made of.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="memory and time that a run would need",
        description="Predict the memory of every actor and the time of an iteration, and say whether it fits.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument(
        "file",
        type=experiment_file,
        metavar="FILE",
        help="experiment file, or the name of a tuned example, e.g. alfworld_qwen3_1.7b",
    )
    parser.add_argument(
        "--gpus", type=terminal.positive, metavar="N", help="GPUs that there are (default: as many as asked for)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GB",
        help="memory of each, in GiB (default: that of the GPUs here, else 80)",
    )
    terminal.add_env_adapter_option(parser)
    terminal.add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict and print."""
    from trial_ray.cli.train import resolve_config
    from trial_ray.planning.plan import make_plan, memory_table, nearest_fit, time_table, verdict
    from trial_ray.planning.request import PlanRequest
    from trial_ray.planning.step_time import step_time
    from trial_ray.runs.experiment import load_experiment

    if args.gpu_memory is not None and not args.gpu_memory > 0:
        raise ConfigError(f"--gpu-memory is {args.gpu_memory:g}, expected a number of GiB above 0.")
    config = resolve_config(load_experiment(args.file).config, None, None, args.overrides, args.env_adapters)
    config.validate()
    request = PlanRequest.of(config)
    machine, device = _machine(args, request)
    plan = make_plan(request, machine)
    found = None if plan.fits else nearest_fit(request, machine)
    console = terminal.output()
    for shown in (plan, found[0]) if found else (plan,):
        console.print(memory_table(shown, machine))
        console.print(time_table(step_time(shown.request, device), device))
        if shown is plan:
            terminal.show(verdict(plan, found))
    return terminal.DONE if plan.fits else terminal.FAILED


def _machine(args: argparse.Namespace, request: PlanRequest) -> tuple[Machine, Device]:
    """The machine that was named, else this one; a run that asks for GPUs where there are none is planned for 80 GiB."""
    from trial_ray.planning.memory import GIB
    from trial_ray.planning.plan import Machine
    from trial_ray.planning.step_time import gpu_like, host_bytes, measured_cpu, visible_gpus

    if not request.gpus:
        return Machine(args.gpus, None, host_bytes()), measured_cpu()
    if args.gpu_memory:
        name, size = "", args.gpu_memory * GIB
    else:
        name, size = min(visible_gpus(), key=lambda gpu: gpu[1], default=("", DEFAULT_GPU_GIB * GIB))
    return Machine(args.gpus, size), gpu_like(size / 1e9, name)

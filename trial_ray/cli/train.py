"""``trial-ray train FILE``: train what an experiment file describes, from the evaluation before to the evaluation after."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import method_names
from trial_ray.cli import console as terminal
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.runs.checkpoints import CHECKPOINT_EVERY, CHECKPOINTS_KEPT
from trial_ray.runs.experiment import experiment_file

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig
    from trial_ray.runs.folder import RunFolder

HELP = "train an agent from an experiment file"
EPILOG = """examples:
  trial-ray train tuned_examples/alfworld_quickstart.py
  trial-ray train tuned_examples/alfworld_quickstart.py --method grpo --seed 1 --out runs/grpo-1
  trial-ray train tuned_examples/alfworld_quickstart.py --iterations 40 --resume runs/grpo-1
  trial-ray train FILE --set lr=1e-4 --set env_config.split=train
  trial-ray train FILE --env-adapter my_adapter.py
  trial-ray train FILE --log-to wandb --log-to mlflow

FILE is Python that defines `config` (an RLlib AlgorithmConfig) and `stop` (such as {"training_iteration": 20}), or the
name of one in tuned_examples/ without its .py, which an installed package has, too.
An evaluation set in the config is played before and after training.
Ctrl-C finishes the iteration that is under way, saves a checkpoint and exits with 130; Ctrl-C again stops at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file",
        type=experiment_file,
        metavar="FILE",
        help="experiment file, or the name of a tuned example, e.g. alfworld_quickstart",
    )
    names = ", ".join(method_names())
    parser.add_argument("--method", metavar="NAME", help=f"train with another method: {names}, or a FILE.py of yours")
    parser.add_argument(
        "--iterations", type=terminal.positive, metavar="N", help="iterations in all (default: the file's)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="seed of tasks, sampling and initialisation")
    parser.add_argument(
        "--checkpoint-every",
        type=terminal.positive,
        default=CHECKPOINT_EVERY,
        metavar="N",
        help="iterations between checkpoints (default: %(default)s); the last iteration is always saved",
    )
    parser.add_argument(
        "--keep-checkpoints",
        type=terminal.positive,
        default=CHECKPOINTS_KEPT,
        metavar="K",
        help="keep the newest K checkpoints (default: %(default)s)",
    )
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<file>-<time>)")
    folder.add_argument("--resume", type=Path, metavar="DIR", help="continue the run in DIR from its last checkpoint")
    terminal.add_options(parser, "--log-to", "--env-adapter", "--trust", "--set")


def run(args: argparse.Namespace) -> int:
    """Train; see the module's docstring."""
    from trial_ray.algorithms.initial_policy import require_initial_policy
    from trial_ray.runs.experiment import load_experiment
    from trial_ray.runs.folder import RunFolder
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.report import leave_report
    from trial_ray.runs.session import TrainingSession
    from trial_ray.runs.terminal import library_log, print_overview, waiting
    from trial_ray.runs.trackers import require_trackers

    require_trackers(args.log_to)
    console = terminal.output()
    with waiting(console, f"reading {args.file}"):  # which imports Ray and torch
        experiment = load_experiment(args.file)
    stop = {**experiment.stop, "training_iteration": args.iterations} if args.iterations else experiment.stop
    if not stop:
        raise ConfigError(f"{args.file} defines no `stop`; define it, or give --iterations N.")
    config = resolve_config(experiment.config, args.method, args.seed, args.overrides, args.env_adapters)
    path = args.resume or args.out or default_folder(args.file)
    RunFolder(path.resolve()).configure(config)
    config.validate()
    require_initial_policy(config)
    if args.iterations:
        # A run that was cut short on purpose, to try something out, is not refused.
        for complaint in config.unfinished_schedules(args.iterations):
            console.print(f"[yellow]warning:[/] {complaint}", highlight=False, soft_wrap=True)
    elif "training_iteration" in stop:
        config.require_schedules_within(stop["training_iteration"])
    folder = reopen_for(config, args.resume) if args.resume else RunFolder.create(path, config, args.file, sys.argv)
    log = None if args.verbose else folder.library_log
    print_overview(console, config, stop, folder.path, log)
    session = TrainingSession(
        config,
        stop,
        folder,
        console,
        resume=args.resume is not None,
        checkpoint_every=args.checkpoint_every,
        checkpoints_kept=args.keep_checkpoints,
        log_to=args.log_to,
        trust=args.trust,
    )
    with library_log(log, console) if log else nullcontext():
        session.run(ray_session(show=True))
    leave_report(folder.path, console)
    return terminal.INTERRUPTED if session.interrupted else terminal.DONE


def resolve_config(
    config: GRPOConfig,
    method: str | None,
    seed: int | None,
    overrides: list[str],
    env_adapters: Sequence[Path] = (),
) -> GRPOConfig:
    """A copy of the file's config under the chosen method, with the overrides, the seed and the adapters."""
    from trial_ray.algorithms.methods import with_method
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.overrides import apply_overrides

    if method is not None:
        config = with_method(config, method)
    config = apply_overrides(config, overrides)
    if env_adapters:
        config.environment(adapter=load_adapters(env_adapters))
    return config if seed is None else config.debugging(seed=seed)


def default_folder(file: Path) -> Path:
    """``runs/<file stem>-<local time>``."""
    return Path("runs") / f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def reopen_for(config: GRPOConfig, path: Path) -> RunFolder:
    """Open a run to continue it with ``config``.

    Raises:
        CheckpointError: it is no run folder, or was trained with another method.
    """
    from trial_ray.algorithms.methods import method_of
    from trial_ray.runs.config_record import load_method
    from trial_ray.runs.folder import RunFolder

    folder = RunFolder.reopen(path, sys.argv)
    recorded, asked = load_method(folder.path / "resolved_config.json"), method_of(config)
    if recorded != asked:
        raise CheckpointError(f"{path} was trained with {recorded}, not {asked}. Resume it with --method {recorded}.")
    return folder

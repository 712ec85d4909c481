"""``trial-ray train FILE``: trains an agent from an experiment file."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.algorithms.methods import method_of, with_method
from trial_ray.cli.console import (
    DONE,
    ENV_ADAPTER,
    FILE,
    INTERRUPTED,
    ITERATIONS,
    LOG_TO,
    METHOD,
    SET,
    TRUST,
    command,
    folder_or_uri,
    one_of,
    option,
    output,
    positive,
)
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.files import Numbers
from trial_ray.runs.checkpoints import CHECKPOINT_EVERY, CHECKPOINTS_KEPT
from trial_ray.runs.experiment import apply_overrides, load_experiment
from trial_ray.runs.terminal import library_log, print_overview, show, waiting

if TYPE_CHECKING:
    from rich.console import Console

    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.runs.folder import RunFolder


@command(
    "train an agent from an experiment file",
    """examples:
  trial-ray train tuned_examples/alfworld_quickstart.py
  trial-ray train tuned_examples/alfworld_quickstart.py --method grpo --seed 1 --out runs/grpo-1
  trial-ray train tuned_examples/alfworld_quickstart.py --method grpo --seed 1 --iterations 40 --resume runs/grpo-1
  trial-ray train FILE --set lr=1e-4 --set env_config.split=train
  trial-ray train FILE --env-adapter my_adapter.py
  trial-ray train FILE --log-to wandb --log-to mlflow

FILE is Python that defines `config` (an RLlib AlgorithmConfig) and `stop` (such as {"training_iteration": 20}), or the
name of one in tuned_examples/ without its .py; an installed package has them, too.
An evaluation set in the config is played before and after training.
With --resume the settings are those of FILE and of this command, not of the run: give --method, --seed and --set again.
Ctrl-C finishes the current iteration, saves a checkpoint and exits with 130; Ctrl-C again stops at once.
""",
    FILE,
    METHOD,
    ITERATIONS,
    option("--seed", "seed of tasks, sampling and initialisation", "S", int),
    option(
        "--checkpoint-every",
        "iterations between checkpoints (default: %(default)s); the last iteration is always saved",
        "N",
        positive,
        default=CHECKPOINT_EVERY,
    ),
    option(
        "--keep-checkpoints",
        "keep the newest K checkpoints (default: %(default)s)",
        "K",
        positive,
        default=CHECKPOINTS_KEPT,
    ),
    one_of(
        option(
            "--out",
            "run folder (default: runs/<file>-<time>), or a URI such as s3://BUCKET/RUN, where the run is then kept",
            "DIR",
            folder_or_uri,
        ),
        option("--resume", "continue the run in DIR, or at a URI, from its last checkpoint", "DIR", folder_or_uri),
    ),
    LOG_TO,
    ENV_ADAPTER,
    TRUST,
    SET,
)
def train(args: Namespace) -> int:
    """Train a policy from an experiment file; with an evaluation set, evaluate before and after training."""
    from trial_ray.runs.folder import RunFolder, interrupts_noted
    from trial_ray.runs.locks import require_free_folder
    from trial_ray.runs.metrics_file import check_metric
    from trial_ray.runs.stored_run import local_folder, stored_run
    from trial_ray.runs.trackers import require_trackers

    require_trackers(args.log_to)
    if isinstance(args.out, Path):
        require_free_folder(args.out, f", or continue it with --resume {args.out}")
    console = output()
    with waiting(console, f"reading {args.file}"):  # This takes seconds, because the file imports Ray and torch.
        experiment = load_experiment(args.file)
    # This slow import comes after the loading of the file, so that a missing file is reported at once.
    from trial_ray.algorithms.startup import require_inputs

    stop = {**experiment.stop, "training_iteration": args.iterations} if args.iterations else experiment.stop
    if not stop:
        raise ConfigError(f"{args.file} defines no `stop`; define it, or give --iterations N.")
    config = resolve_config(experiment.config, args.method, args.seed, args.overrides, args.env_adapters)
    place = args.resume or args.out or default_folder(args.file)
    path = local_folder(place)
    RunFolder(path).configure(config)
    config.validate()
    for name in stop:
        check_metric(name, "a key of stop", config)
    if args.iterations:
        # Only warn about unfinished schedules: --iterations may shorten a run for a first test.
        for complaint in config.unfinished_schedules(args.iterations):
            console.print(f"[yellow]warning:[/] {complaint}", highlight=False, soft_wrap=True)
    elif "training_iteration" in stop:
        config.require_schedules_within(stop["training_iteration"])
    require_inputs(config)
    new_folders = [] if args.resume or (path / "run.json").exists() else [path]
    with (
        stored_run(place, resume=args.resume is not None, command=sys.argv, print_line=show) as store,
        interrupts_noted(lambda: new_folders),
    ):
        folder = reopen_for(config, path) if args.resume else RunFolder.create(path, config, args.file, sys.argv)
        folder.address = str(place)
        return _train(args, config, stop, folder, console, store)


def _train(
    args: Namespace,
    config: GRPOConfig,
    stop: Numbers,
    folder: RunFolder,
    console: Console,
    store: Callable[[], None],
) -> int:
    """Train in a run folder and write a report there."""
    from trial_ray.reports.page import leave_report
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.runs.session import TrainingSession

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
        on_checkpoint=store,
    )
    with library_log(log, console) if log else nullcontext():
        session.run(ray_session(show=True))
    leave_report(folder.path)
    return INTERRUPTED if session.interrupted else DONE


def resolve_config(
    config: GRPOConfig, method: str | None, seed: int | None, overrides: list[str], env_adapters: Sequence[Path] = ()
) -> GRPOConfig:
    """Return a copy of an experiment's config with the command line's method, seed, overrides and environment adapters.

    Args:
        config: config of the experiment file.
        method: name or file of the method, or ``None`` to keep the config's.
        seed: seed of the run, or ``None`` to keep the config's.
        overrides: the ``key=value`` arguments of ``--set``.
        env_adapters: files of adapters, which replace the config's adapters of the same environments.

    Raises:
        ConfigError: an override is invalid, or the config searches over a setting.
    """
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.sweeps.space import search_space

    if method is not None:
        config = with_method(config, method)
    config = apply_overrides(config, overrides)
    if env_adapters:
        added = load_adapters(env_adapters)
        replaced = {adapter.env_id for adapter in added}
        kept = (adapter for adapter in config.adapters if adapter.env_id not in replaced)
        config.environment(adapter=[*kept, *added])
    if seed is not None:
        config.debugging(seed=seed)
    if searched := [path for path, _ in search_space(vars(config))]:
        raise ConfigError(
            f"The file searches over {', '.join(searched)}: use `trial-ray sweep`, or give a value, --set {searched[0]}=VALUE."
        )
    return config


def default_folder(file: Path) -> Path:
    """Return the default folder of a run or sweep, ``runs/<file stem>-<local time>``."""
    return Path("runs") / f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def reopen_for(config: GRPOConfig, path: Path) -> RunFolder:
    """Open a run folder to continue the run with ``config``.

    Raises:
        CheckpointError: ``path`` is not a run folder, or the run was trained with another method.
    """
    from trial_ray.runs.config_record import load_method
    from trial_ray.runs.folder import RunFolder

    folder = RunFolder.reopen(path, sys.argv)
    recorded, method = load_method(folder.path / "resolved_config.json"), method_of(config)
    moved = recorded.endswith(".py") and Path(recorded).name == Path(method).name
    if recorded != method and not moved:
        raise CheckpointError(f"{path} was trained with {recorded}, not {method}. Resume it with --method {recorded}.")
    return folder

"""``trial-ray evaluate CHECKPOINT|oracle``: play a panel of tasks and print success by family."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.commands import console as terminal
from trial_ray.evaluation.panel import NAMED_PANELS

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from rich.console import Console

    from trial_ray.evaluation.panel import Panel
    from trial_ray.evaluation.results import EvaluationResult

ORACLE = "oracle"
PANEL_SEED = 0
EPILOG = """examples:
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split valid_seen
  trial-ray evaluate runs/my-run --env trial/ALFWorld-v0 --split valid_unseen --json unseen.json
  trial-ray evaluate runs/my-run/checkpoints/000020 --env trial/ALFWorld-v0 --split generated --episodes 64
  trial-ray evaluate path/to/hf_model --env trial/ALFWorld-v0 --split valid_seen --set engine=transformers

CHECKPOINT is a run folder (its newest checkpoint), a checkpoint, or a Hugging Face model folder. A checkpoint inside a
run folder is evaluated with that run's settings (prompt, limits, engine); --set replaces them.
The game data are found through the environment's own rules, or with --set env_config.data=FOLDER.
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="success of a checkpoint or of the oracle, by family",
        description="Play each task of a panel once, through the same engines as training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("policy", metavar="CHECKPOINT|oracle", help="what to evaluate, see below")
    parser.add_argument("--env", required=True, metavar="ID", help="environment, e.g. trial/ALFWorld-v0")
    parser.add_argument("--split", required=True, metavar="NAME", help="the environment's split, e.g. valid_seen")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--episodes", type=terminal.positive, metavar="N", help="play N tasks of the split, always the same"
    )
    size.add_argument(
        "--panel",
        choices=sorted(NAMED_PANELS),
        help="; ".join(f"{name}: {size or 'all'} tasks" for name, size in NAMED_PANELS.items()) + " (default: full)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every episode as JSON")
    terminal.add_set_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate; see the module's docstring."""
    console = terminal.output()
    size = args.episodes or NAMED_PANELS[args.panel or "full"]
    evaluate = evaluate_the_oracle if args.policy == ORACLE else evaluate_checkpoint
    result = evaluate(args, size, console)
    console.print(result.table(title=f"{result.policy} · {args.env} · {args.split}"))
    if args.json:
        console.print(f"episodes: {result.save(args.json)}", highlight=False, soft_wrap=True)
    return terminal.DONE


def evaluate_the_oracle(args: argparse.Namespace, size: int | None, console: Console) -> EvaluationResult:
    """Replay walkthroughs."""
    from rich.progress import Progress

    from trial_ray.evaluation.oracle import evaluate_oracle
    from trial_ray.runs.overrides import environment_overrides

    env_config = environment_overrides(args.env, args.overrides)
    panel = choose_panel(args.env, env_config, args.split, size)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{len(panel)} games", total=len(panel))
        return evaluate_oracle(panel, env_config, lambda episode: progress.advance(task))


def evaluate_checkpoint(args: argparse.Namespace, size: int | None, console: Console) -> EvaluationResult:
    """Load the model into the engines and play."""
    from trial_ray.runs.ray_session import ray_session

    config = checkpoint_config(args.policy, args.env, args.split, args.overrides)
    env_config = {**config.env_config, **config.panel_env_config}
    panel = choose_panel(args.env, env_config, args.split, size)
    config.panel(num_tasks=len(panel), seed=PANEL_SEED)
    config.validate()
    with ray_session(args.verbose):
        with console.status("starting Ray actors and engines"):
            algorithm = config.build_algo()
        try:
            with console.status(f"playing {len(panel)} tasks"):
                result = algorithm.evaluate_panel(panel)
        finally:
            algorithm.stop()
    result.policy = args.policy
    return result


def checkpoint_config(checkpoint: str, env: str, split: str, overrides: list[str]) -> AlgorithmConfig:
    """The config that plays a checkpoint's model, with the settings of the run folder that it lies in, if any."""
    from trial_ray.runs.checkpoints import find_model, find_run_folder
    from trial_ray.runs.config_record import load_record
    from trial_ray.runs.methods import new_config
    from trial_ray.runs.overrides import apply_overrides

    model = find_model(checkpoint)
    run_folder = find_run_folder(model)
    config = load_record(run_folder / "resolved_config.json") if run_folder else new_config("grpo")
    env_config = {**config.env_config, **config.panel_env_config} if config.env == env else {}
    config.environment(env)
    config.env_config = {**env_config, "split": split}
    config.policy(model_path=str(model), warm_start=None)
    config.panel(split=split, env_config={})
    config.recording(trajectories_folder=None)
    config.kl_coeff = 0.0  # nothing is trained, so no reference model is needed
    return apply_overrides(config, overrides)


def choose_panel(env: str, env_config: dict[str, Any], split: str, size: int | None) -> Panel:
    """The tasks to play; the same ones on every machine."""
    from trial_ray.evaluation.panel import Panel

    return Panel.from_env(env, env_config, split, size, seed=PANEL_SEED)

"""``trial-ray sft``: supervised fine-tuning of a policy on an expert's episodes, on recorded episodes or on chat messages."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trial_ray.cli.console import ENV_ADAPTER, SET, command, flag, option, positive, print_table
from trial_ray.errors import UserInputError
from trial_ray.files import require_new_folder
from trial_ray.progress import progress_bar
from trial_ray.runs.experiment import apply_overrides, experiment_file, load_experiment, override_dataclass
from trial_ray.runs.terminal import show

if TYPE_CHECKING:
    from trial_ray.adapters.adapter import EnvironmentAdapter
    from trial_ray.algorithms.grpo import GRPOConfig
    from trial_ray.sft.sources import Dropped
    from trial_ray.sft.training import Check
    from trial_ray.trajectory import Trajectory

EXPERT = "expert"


@command(
    "fine-tune a policy on an expert, on recorded episodes or on chat messages",
    """examples:
  trial-ray sft --from expert                                         the tiny default model, on generated games
  trial-ray sft --from expert --model path/to/hf_model --set optimizer=adamw --set learning_rate=1e-5 --out models/start
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split generated --record recorded
  trial-ray sft FILE.py --from recorded --out models/start            recorded episodes, in the prompts of FILE.py
  trial-ray sft FILE.py --from runs/my-run --min-return 1 --per-task 2 --out models/start
  trial-ray sft FILE.py --from messages.jsonl --out models/start      chat messages, as `export --messages` writes them

FILE.py is the experiment that the fine-tuned policy will start: its model, environment, prompts, limits, adapters and learners are
used, and the result is its new model_path. Without FILE.py, the config of the recording is used.
Only the tokens of responses are learned. A share of the tasks is held out; the policy with the lowest held-out loss is kept, or
with --set games=N the one that wins the most of N games. The same command continues after an interruption.
--from expert clones the expert of the environment's adapter (docs/warmstart.md) and caches the result; --set changes fields of
trial_ray.warmstart.WarmStartSettings. For other sources --set changes fields of trial_ray.sft.training.SFTSettings, and settings
of the experiment such as lora_rank.
""",
    option("experiment", "experiment file, or the name of a tuned example", "FILE", experiment_file, nargs="?"),
    option(
        "--from",
        "expert, the folder of a run or of recorded episodes, or a file of chat messages",
        "SOURCE",
        required=True,
        dest="source",
    ),
    option("--out", "new folder of the model (with --from expert optional)", "DIR", Path),
    option(
        "--model",
        "model to fine-tune (default: the experiment's; with --from expert a tiny model from scratch)",
        "PATH",
    ),
    option("--seed", "seed of the order of episodes (default: 0); with --from expert of everything", "S", int),
    option("--min-return", "imitate only episodes with at least this return", "R", float),
    option("--per-task", "imitate at most N episodes of a task, those with the highest returns", "N", positive),
    flag("--strict", "stop at the first episode or response that cannot be imitated, instead of counting it"),
    ENV_ADAPTER,
    SET,
)
def sft(args: Namespace) -> None:
    """Fine-tune a policy and write it as a model folder."""
    if args.source == EXPERT:
        _clone(args)
        return
    if args.out is None:
        raise UserInputError("Name the new folder of the model with --out DIR.")
    require_new_folder(args.out)
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.algorithms.startup import initial_policy
    from trial_ray.config.declare import fields_of
    from trial_ray.models.loading import load_tokenizer
    from trial_ray.runs.ray_session import ray_session
    from trial_ray.sft.sources import Dropped, load_episodes, select
    from trial_ray.sft.training import FineTuning, SFTSettings

    source, adapters, names = Path(args.source).expanduser(), load_adapters(args.env_adapters), fields_of(SFTSettings)
    sft_overrides = [override for override in args.overrides if override.partition("=")[0] in names]
    settings = override_dataclass(SFTSettings(seed=args.seed or 0), sft_overrides)
    config = _config(args, source, adapters, [item for item in args.overrides if item not in sft_overrides])
    config.rl_module(model_path=initial_policy(config), warm_start=None).fix_date()
    dropped = Dropped(strict=args.strict)
    episodes = load_episodes(source, config, load_tokenizer(str(config.model_path)), dropped, adapters)
    chosen = select(episodes, dropped, args.min_return, args.per_task)
    _show_selection(chosen, dropped)
    tuning = FineTuning(config, settings, chosen, args.out)
    show(f"{tuning.num_updates} updates; {len(tuning.training)} episodes to learn, {len(tuning.held_out)} held out")
    with ray_session(args.verbose), progress_bar("updates", tuning.num_updates) as update:
        tuning.run(lambda step, loss: update(step, f"loss {loss:.3f}"), lambda check: show(str(check)))
    path = tuning.finish({"source": str(source), "left_out": {"episodes": dropped.episodes, "turns": dropped.turns}})
    _plot(tuning.checks, path / "sft.png")
    show(f"model: {path}")


def _clone(args: Namespace) -> None:
    """Train a policy to imitate the expert of the environment's adapter."""
    from trial_ray.adapters.registry import load_adapters
    from trial_ray.algorithms.startup import policy_folder, warm_start_settings
    from trial_ray.warmstart import WarmStartSettings, warm_start

    if args.min_return is not None or args.per_task or args.strict:
        raise UserInputError(
            "--min-return, --per-task and --strict select recorded episodes; leave them out with --from expert."
        )
    settings, adapters = WarmStartSettings(), load_adapters(args.env_adapters)
    if args.experiment is not None:
        settings, own_adapters = warm_start_settings(load_experiment(args.experiment).config)
        adapters = (*adapters, *own_adapters)
    options = {"model_path": args.model, "seed": args.seed}
    settings = replace(settings, **{name: value for name, value in options.items() if value is not None})
    settings = override_dataclass(settings, args.overrides)
    if settings.model_path is not None:
        settings = replace(settings, model_path=policy_folder(settings.model_path))
    show(f"model: {warm_start(settings, adapters, out=args.out).path}")


def _config(
    args: Namespace, source: Path, adapters: Sequence[EnvironmentAdapter], overrides: Sequence[str]
) -> GRPOConfig:
    """Return the config of the experiment file with ``overrides`` and ``--model``.

    Without an experiment file, the config is that of the run or recorded evaluation in the folder ``source``.
    """
    from trial_ray.algorithms.methods import with_method
    from trial_ray.sft.messages import Recording

    if args.experiment is not None:
        config = load_experiment(args.experiment).config
    elif source.is_dir():
        config = Recording(source, adapters).config
    else:
        raise UserInputError(
            "Name the experiment file whose model and prompts are used: trial-ray sft FILE.py --from SOURCE …"
        )
    config = apply_overrides(with_method(config, "grpo"), overrides)
    if args.model is not None:
        config.rl_module(model_path=args.model, warm_start=None)
    if config.model_path is None and config.warm_start is None:
        raise UserInputError("There is no model to fine-tune; name one with --model PATH.")
    config.validate()
    return config


def _show_selection(chosen: Sequence[Trajectory], dropped: Dropped) -> None:
    """Print how many episodes and turns are imitated, and how many are left out for which reason."""
    counted = {"episodes": dropped.episodes, "turns": dropped.turns}
    rows = [(kind, *row) for kind, reasons in counted.items() for row in reasons.most_common()]
    if rows:
        print_table("left out", ("", "reason", ">number"), rows)
    show(f"{len(chosen):,} episodes with {sum(len(episode.turns) for episode in chosen):,} turns are imitated")


def _plot(checks: Sequence[Check], target: Path) -> None:
    """Plot the training loss and the held-out loss into the file ``target``, if matplotlib is installed."""
    from trial_ray.errors import MissingDependencyError
    from trial_ray.reports.plots import drawing

    with suppress(MissingDependencyError), drawing([target], (6.4, 3.6)) as (_, axis):
        for name, label, drawn in (("training_loss", "training", checks[1:]), ("loss", "held out", checks)):
            values = [getattr(check, name) for check in drawn]
            axis.plot([check.step for check in drawn], values, marker="o", label=label)
        axis.set(xlabel="updates", ylabel="negative log-likelihood, nats per token")
        axis.legend()

"""Commands around a warm start: ``warmstart`` makes a model to train from, ``judge`` measures what its hindsight view knows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal
from trial_ray.cli.evaluate import recorded_config

if TYPE_CHECKING:
    from rich.table import Table

    from trial_ray.environments.adapter import EnvironmentAdapter
    from trial_ray.warmstart.settings import WarmStartSettings


def add_warmstart_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``warmstart``."""
    parser.add_argument(
        "--model", metavar="PATH", help="Hugging Face model folder (default: a tiny model from scratch)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of weights, data order and sampling")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also copy the model into this new folder")
    terminal.add_options(parser, "--env-adapter", "--set")


def warmstart(args: argparse.Namespace) -> int:
    """Clone an exploring oracle into a causal LM, to start reinforcement learning from."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart import WarmStartSettings, warm_start

    settings = override_dataclass(WarmStartSettings(model_path=args.model, seed=args.seed), args.overrides)
    result = warm_start(settings, load_adapters(args.env_adapters), out=args.out, progress=True)
    terminal.show(f"model: {result.path}")
    return terminal.DONE


WARMSTART = terminal.Command(
    "clone an exploring oracle into a model, to train from",
    """examples:
  trial-ray warmstart                                          the tiny default model, on generated games
  trial-ray warmstart --out models/start --set games=1000
  trial-ray warmstart --model path/to/hf_model --set optimizer=adamw --set learning_rate=1e-5 --set response_style=tagged

The result is cached: the same settings return at once. Settings are the fields of
trial_ray.warmstart.WarmStartSettings.
""",
    add_warmstart_arguments,
    warmstart,
)


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``judge``."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="run folder (its newest checkpoint), checkpoint, folder of a causal LM in Hugging Face format, or package:NAME",
    )
    parser.add_argument("--games", type=terminal.positive, metavar="N", help="held-out games to play (default: 192)")
    parser.add_argument(
        "--demonstrator",
        type=float,
        metavar="P",
        help="let the demonstrator play, with probability P another action than the one it planned, and the model only score the "
        "turns: for a model that cannot play yet",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write judgement.json, with every turn, and judgement.png"
    )
    terminal.add_options(parser, "--env-adapter", "--set")


def judge(args: argparse.Namespace) -> int:
    """Measure whether a model's hindsight view knows better than the model acts."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.files import finite, make_folder, write_json
    from trial_ray.runs.checkpoints import find_model
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart.judgement import judge_model

    if args.out is not None:
        make_folder(args.out)
    adapters, model = load_adapters(args.env_adapters), find_model(args.model)
    # A model that a GPU cloned is judged on a CPU too, unless --set device=cuda asks for one.
    settings = dataclasses.replace(_made_with(model, adapters), model_path=str(model), device="cpu")
    judgement = judge_model(override_dataclass(settings, args.overrides), adapters, args.games, args.demonstrator)
    found = judgement.figures
    console = terminal.output()
    console.print(_table(found))
    terminal.show(str(judgement))
    if args.out is not None:
        from trial_ray.reports.plots import plot_judgement

        turns = [dataclasses.asdict(turn) for turn in judgement.turns]
        data = {**found, "of_turns": turns}
        path = write_json(args.out / "judgement.json", finite(data))
        plot_judgement(data, args.out / "judgement.png")
        terminal.show(f"written: {path} and judgement.png")
    return terminal.DONE


def _made_with(model: Path, adapters: Sequence[EnvironmentAdapter]) -> WarmStartSettings:
    """Environment, prompts and limits of the run that a model lies in, else those of its warm start."""
    from trial_ray.algorithms.initial_policy import warm_start_settings
    from trial_ray.warmstart.policy import recorded_settings

    config, _ = recorded_config(model, adapters)
    if config is None:
        return recorded_settings(model)
    return dataclasses.replace(warm_start_settings(config)[0], chat_template_date=config.chat_template_date)


def _table(found: dict[str, Any]) -> Table:
    """Number and gap by kind of turn."""
    from rich.table import Table

    title = f"{found['turns']} turns of {found['games']} held-out games, {found['won']} won"
    table = Table("turns", "number", "mean gap (nats a token)", title=title)
    for name in ("planned", "wasted", "decisive", "routine"):
        if (of := found[name])["turns"]:
            table.add_row(name, str(of["turns"]), f"{of['gap']:+.3f}")
    return table


JUDGE = terminal.Command(
    "measure whether a model's hindsight view tells wasted actions from planned ones",
    """examples:
  trial-ray judge models/start
  trial-ray judge runs/my-run --games 64
  trial-ray judge path/to/hf_model --demonstrator 0.25
  trial-ray judge path/to/hf_model --set response_style=tagged --set history_window=2 --games 64 --out judgement

Run it before a long TRIAL run: where the gap between the two views does not tell a wasted action from a planned one, its weights
have nothing to weigh. A model of a run or of `trial-ray warmstart` is judged under the settings that it was made with; --set
changes them, and states those of any other model (fields of trial_ray.warmstart.WarmStartSettings).
""",
    add_judge_arguments,
    judge,
)

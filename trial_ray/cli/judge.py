"""``trial-ray judge``: does a model's hindsight view know better than the model acts?"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.cli import console as terminal

if TYPE_CHECKING:
    from rich.table import Table

HELP = "measure whether a model's hindsight view tells wasted actions from planned ones"
EPILOG = """examples:
  trial-ray judge models/start
  trial-ray judge path/to/hf_model --set response_style=tagged --set history_window=2 --games 64 --out judgement

Run it before a long TRIAL run: where the gap between the two views does not tell a wasted action from a planned one, its weights
have nothing to weigh. A model that `trial-ray warmstart` made is judged under the settings that it was made with; --set changes
them, and states those of any other model (fields of trial_ray.warmstart.WarmStartSettings).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a causal LM in Hugging Face format")
    parser.add_argument("--games", type=terminal.positive, metavar="N", help="held-out games to play (default: 192)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write judgement.json, with every turn, and judgement.png"
    )
    terminal.add_options(parser, "--env-adapter", "--set")


def run(args: argparse.Namespace) -> int:
    """Judge."""
    from trial_ray.environments.registry import load_adapters
    from trial_ray.files import finite, make_folder, write_json
    from trial_ray.runs.overrides import override_dataclass
    from trial_ray.warmstart.judgement import judge_model
    from trial_ray.warmstart.policy import recorded_settings

    if args.out is not None:
        make_folder(args.out)
    # A model that a GPU cloned is judged on a CPU too, unless --set device=cuda asks for one.
    settings = dataclasses.replace(recorded_settings(args.model), model_path=str(args.model), device="cpu")
    judgement = judge_model(override_dataclass(settings, args.overrides), load_adapters(args.env_adapters), args.games)
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


def _table(found: dict[str, Any]) -> Table:
    """Number and gap by kind of turn."""
    from rich.table import Table

    title = f"{found['turns']} turns of {found['games']} held-out games, {found['won']} won"
    table = Table("turns", "number", "mean gap (nats a token)", title=title)
    for name in ("planned", "wasted", "decisive", "routine"):
        if (of := found[name])["turns"]:
            table.add_row(name, str(of["turns"]), f"{of['gap']:+.3f}")
    return table

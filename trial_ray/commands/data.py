"""``trial-ray data alfworld``: what the games are, where they come from, what is here; or generate games."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trial_ray.commands import console as terminal
from trial_ray.errors import UserInputError

EPILOG = """examples:
  trial-ray data alfworld                                                   what is needed, what was found
  trial-ray data alfworld --generate 200 --difficulty small --out my_games  write games of one's own
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split train --set env_config.data=my_games

Training and evaluation can also generate games as they go, without files: split "generated" of trial/ALFWorld-v0.
"""
ABOUT = """ALFWorld: household text games in six families, played on the TextWorld engine.

  engine    pip install -e ".[alfworld]" (compiles two small C programs: a compiler, make and cmake are needed)
  games     4,027 in all (train 3,553, valid_seen 140, valid_unseen 134, valid_train 200), about 340 MB unpacked
  from      alfworld-download, a command of the package alfworld, fetches them into ~/.cache/alfworld;
            set ALFWORLD_DATA to use another folder
  without   the generator makes solvable games in all six families: split "generated", or --generate N --out DIR
"""


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "data",
        help="what an environment's data are and where they lie; generate games",
        description="Tell what an environment needs, from where, how large it is, what was found; or generate games.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("environment", choices=["alfworld"], help="whose data")
    parser.add_argument("--generate", type=terminal.positive, metavar="N", help="write N games, each checked by replay")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the generator (default: 0)")
    parser.add_argument("--difficulty", default="small", metavar="L", help="tiny, small (default), medium or official")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder, in the layout of the official release")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate, or tell."""
    if args.generate is None:
        describe()
        return terminal.DONE
    if args.out is None:
        raise UserInputError("--generate needs --out DIR, the new folder that the games are written into.")
    generate(args.out, args.generate, args.seed, args.difficulty)
    return terminal.DONE


def generate(folder: Path, count: int, seed: int, difficulty: str) -> None:
    """Write generated games.

    Raises:
        UserInputError: the folder holds something already.
    """
    from trial_envs.alfworld.export import write_games

    console = terminal.output()
    with console.status(f"generating {count} games and replaying their solutions"):
        try:
            written = write_games(folder, count, seed, difficulty)
        except FileExistsError as error:
            raise UserInputError(str(error)) from error
    console.print(f"{len(written)} games: {folder.resolve()} (split train)", highlight=False, soft_wrap=True)
    console.print(f"play them with --set env_config.data={folder}", highlight=False, soft_wrap=True)


def describe() -> None:
    """Tell what ALFWorld needs and what is here."""
    console = terminal.output()
    console.print(ABOUT, highlight=False, markup=False)
    console.print(f"  found     {found_games()}", highlight=False, markup=False, soft_wrap=True)


def found_games() -> str:
    """Which official games this machine holds, in one sentence."""
    from trial_envs.alfworld.games import OFFICIAL_SPLITS, open_official
    from trial_envs.errors import TrialEnvError

    try:
        source = open_official(None)
    except TrialEnvError as error:
        return str(error)
    counts = []
    for split in OFFICIAL_SPLITS:
        try:
            counts.append(f"{split} {len(source.tasks(split)):,}")
        except TrialEnvError:
            counts.append(f"{split} missing")
    return ", ".join(counts)

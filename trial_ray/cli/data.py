"""``trial-ray data``: show the data of an environment, their source and their location; import or generate them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from trial_ray.cli.console import command, one_of, option, output, positive, show, table
from trial_ray.errors import UserInputError
from trial_ray.files import require_writable

ABOUT_ALFWORLD = """ALFWorld: household text games in six families, played on the TextWorld engine.

  engine    pip install -e ".[alfworld]" (builds planners: a C++ compiler, make and cmake are needed)
  games     4,027 in all (train 3,553, valid_seen 140, valid_unseen 134, valid_train 200), about 340 MB unpacked
  from      alfworld-download, a command of the package alfworld, fetches them into ~/.cache/alfworld;
            set ALFWORLD_DATA to use another folder, or import a local copy with --from FOLDER
  without   the generator makes solvable games in all six families: split "generated", or --generate N --out DIR
"""
ABOUT_WEBSHOP = """WebShop: a shop to search, look around and buy in, in text mode.

  engine    pip install -e ".[webshop]"
  catalogue 1.18 million products (about 5.3 GB), or the small set of 1,000 products (about 5 MB)
  from      setup.sh of github.com/princeton-nlp/WebShop fetches them;
            set WEBSHOP_DATA to use a folder, or import a local copy with --from FOLDER
  without   the generator makes shops whose every goal can be reached: split "generated"
"""


@command(
    "show, import or generate an environment's data",
    """examples:
  trial-ray data alfworld                                                   the data needed, and those found
  trial-ray data alfworld --from downloads/alfworld                         check a local copy by digest, then use it
  trial-ray data alfworld --generate 200 --difficulty small --out my_games  write games
  trial-ray data webshop --from downloads/webshop                           check and index a catalogue, then use it
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split train --set env_config.data=my_games

Nothing is fetched. Training and evaluation can also generate games and shops as they go, without files: split
"generated" of trial/ALFWorld-v0 and trial/WebShop-v0.
""",
    option("environment", "whose data", choices=["alfworld", "webshop"]),
    one_of(
        option("--from", "import the copy in DIR, checked by digest", "DIR", Path, dest="source"),
        option("--generate", "ALFWorld: write N games, each replayed", "N", positive),
    ),
    option("--seed", "seed of the draws (default: 0; 233 for WebShop)", "S", int),
    option("--difficulty", "tiny, small (default), medium or official", "L", default="small"),
    option("--out", "folder to write (for --from: default is the user's cache)", "DIR", Path),
)
def data(args: Namespace) -> None:
    """Import or generate an environment's data, or show the required data, their source and the data found."""
    shop = args.environment == "webshop"
    try:
        if args.out:
            require_writable(args.out)
        if args.source:
            (import_webshop if shop else import_alfworld)(args)
        elif args.generate is None:
            show(
                f"{ABOUT_WEBSHOP}\n  found     {describe_shop()}"
                if shop
                else f"{ABOUT_ALFWORLD}\n  found     {describe_games()}"
            )
        elif shop:
            raise UserInputError(
                'Shops need no files: use split "generated" with env_config.num_products and num_games.'
            )
        elif args.out is None:
            raise UserInputError("--generate needs --out DIR, the new folder that the games are written into.")
        else:
            generate(args.out, args.generate, args.seed or 0, args.difficulty)
    except FileExistsError as error:  # The target folder is not empty.
        raise UserInputError(str(error)) from error


def generate(folder: Path, count: int, seed: int, difficulty: str) -> None:
    """Write generated ALFWorld games."""
    from trial_envs.alfworld.export import write_games

    with output().status(f"generating {count} games and replaying their solutions"):
        written = write_games(folder, count, seed, difficulty)
    show(f"{len(written)} games: {folder.resolve()} (split train)")
    show(f"play them with --set env_config.split=train --set env_config.data={folder}")


def import_alfworld(args: Namespace) -> None:
    """Check official games against the release and copy them into the folder that environments read."""
    from trial_envs.alfworld.importing import import_games

    with output().status("checking games"):
        folder = import_games(args.source, args.out)
    show(f"every game is the published one: {folder}")


def import_webshop(args: Namespace) -> None:
    """Show the catalogue files in a folder and index them."""
    from trial_envs.webshop.preparation import SEED, import_shop
    from trial_envs.webshop.sources import inspect_source

    files = inspect_source(args.source)
    verdicts = {True: "as published", False: "DIFFERS from the 1,000-product set", None: "no digest is published"}
    rows = [
        (file.purpose, file.path.name, f"{file.size / 1e6:.1f} MB", verdicts[file.known])
        if file.path
        else (file.purpose, "MISSING" if file.required else "-")
        for file in files
    ]
    output().print(table("", ("what", "file", "size", "digest"), rows))
    with output().status("indexing"):
        folder = import_shop(args.source, args.out, seed=SEED if args.seed is None else args.seed, files=files)
    show(f"indexed: {folder}")


def describe_games() -> str:
    """Return one line about the official games on this machine."""
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


def describe_shop() -> str:
    """Return one line about the shop on this machine."""
    from trial_envs.errors import TrialEnvError
    from trial_envs.webshop.shops import open_shop

    try:
        shop = open_shop(None)
    except TrialEnvError as error:
        return str(error)
    return f"{shop.num_products:,} products, {shop.num_goals:,} goals"

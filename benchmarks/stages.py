"""Stages of a long measurement: commands with a deadline, each of which leaves one JSON file that later calls go by.

A stage's command writes ``NAME.json`` into the folder that it is given, as often as it has something new (what it left is kept
where it is killed). :func:`run_stage` adds what became of it under the key ``stage``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from measure import commit

from trial_ray.errors import CheckpointError
from trial_ray.files import read_json, write_text
from trial_ray.termination import interrupts_deferred

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("trial_ray", "envs", "benchmarks", "tests", "tuned_examples")
DEADLINE_S = 570.0
"""Of a stage, so that a call of one stage ends within ten minutes."""
GONE_S = 30.0
"""Wait for killed processes: the next stage needs the memory of their device."""
FOLDER = "{folder}"
"""In a command: the folder that the stage writes into."""
TAIL_LINES = 40

PASSED, FAILED, DEADLINE, SKIPPED = "passed", "failed", "deadline", "skipped"
SKIPPED_STATUS = 77
"""Exit status of a stage that cannot be had on this machine; its JSON says why in ``details.reason``."""

SUGGESTIONS = (
    (
        r"out of memory|OutOfMemoryError|No available memory for the cache blocks|Free memory on device",
        "Too little GPU memory: check with nvidia-smi that no other process holds any, or lower gpu_memory_utilization.",
    ),
    (
        r"Python\.h|Failed to find C compiler|no C compiler",
        "Triton needs a compiler and Python's headers: apt-get install gcc python3-dev",
    ),
    (
        r"CUDA driver version is insufficient|driver on your system is too old",
        "Install the driver for torch's CUDA version (trial-ray doctor).",
    ),
    (r"No module named '([\w.]+)'", "Install the package of module {0} (docs/installation.md)."),
)
"""Patterns of a stage's output, and what to do."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: also of its JSON file.
        command: program and arguments; :data:`FOLDER` stands for the folder that it writes into.
        deadline_s: seconds after which it is killed with every process that it started.
    """

    name: str
    command: tuple[str, ...]
    deadline_s: float = DEADLINE_S


def source_digest(root: Path = ROOT) -> str:
    """Of all Python files: the code that a result belongs to, in a clone with changes or a copy without git too."""
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in (root / name).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def finished_record(stage: Stage, out: Path, device: str, source: str) -> dict[str, Any] | None:
    """The stage's JSON, if an earlier call wrote it for the same code and device, whatever became of the stage."""
    try:
        record = read_json(out / f"{stage.name}.json")
    except CheckpointError:
        return None
    about = record.get("stage")
    same = isinstance(about, dict) and (about.get("source"), about.get("device")) == (source, device)
    return record if same else None


def run_stage(stage: Stage, out: Path, device: str, source: str) -> dict[str, Any]:
    """Run a stage; writes ``NAME.json`` and ``NAME.log`` into a folder.

    Args:
        stage: what to run.
        out: the folder.
        device: ``"cuda"`` or ``"cpu"``, for the record.
        source: of :func:`source_digest`, for the record.

    Returns:
        The content of the JSON: measures, environment and details as the stage wrote them, and under ``stage`` its name, status,
        seconds, deadline, command, device, code, end of the output, and for a failed one a suggestion.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{stage.name}.log"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stage-") as folder, log.open("wb") as output:
        command = [word.replace(FOLDER, folder) for word in stage.command]
        status = run_command(command, output, stage.deadline_s)
        seconds = time.monotonic() - began
        try:
            record = read_json(Path(folder) / f"{stage.name}.json")
        except CheckpointError:
            record = {"measures": [], "environment": {}, "details": {}}
    became = {None: DEADLINE, 0: PASSED, SKIPPED_STATUS: SKIPPED}.get(status, FAILED)
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    record["stage"] = {
        "name": stage.name,
        "status": became,
        "exit_status": status,
        "seconds": round(seconds, 1),
        "deadline_s": stage.deadline_s,
        "command": list(stage.command),
        "device": device,
        "source": source,
        "commit": commit(),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "suggestion": suggestion(stage, became, "\n".join(tail)),
        "output_tail": [] if became == PASSED else tail,
    }
    # Figures may be NaN, which strict JSON has no form for.
    write_text(out / f"{stage.name}.json", json.dumps(record, indent=2) + "\n")
    return record


def suggestion(stage: Stage, status: str, output: str) -> str:
    """What to do about a stage that did not pass; empty for others."""
    again = f"make first-gpu-hour ARGS={stage.name}"
    if status == DEADLINE:
        return f"Its JSON has what it had measured within {stage.deadline_s:.0f} s. On a quiet machine: {again}"
    if status != FAILED:
        return ""
    for pattern, advice in SUGGESTIONS:
        if found := re.search(pattern, output):
            return f"{advice.format(*found.groups())} Then: {again}"
    return f"See {stage.name}.log; then: {again}"


def run_command(command: Sequence[str], output: BinaryIO, deadline_s: float) -> int | None:
    """Run a command in the repository; returns its exit status, ``None`` where it was killed at its deadline."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with interrupts_deferred():  # one inside of Popen would lose the process that it has started
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=stage_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process.wait(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is interrupted
        if process is not None and process.poll() is None:
            kill_tree(process)


def stage_environment() -> dict[str, str]:
    """Of a stage's process: this checkout's packages, installed or not, and no network."""
    found = os.environ.get("PYTHONPATH")
    paths = [str(ROOT), str(ROOT / "envs"), *([found] if found else [])]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a running process, its process group and all its descendants, and wait until they are gone."""
    # Ray's processes have groups of their own. They are found while their parents live.
    descendants = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for each in descendants:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(descendants, timeout=GONE_S)

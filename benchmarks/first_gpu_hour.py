"""What to run in the first hour on a GPU, in stages of at most ten minutes.

    python benchmarks/first_gpu_hour.py                       # make first-gpu-hour
    python benchmarks/first_gpu_hour.py STAGE ...             # those named, even where their results are there
    python benchmarks/first_gpu_hour.py --device cpu          # a rehearsal at the smallest sizes, without a GPU

| stage | what it does |
| --- | --- |
| ``environment`` | driver, GPUs, versions, compiler and headers, the checks of ``trial-ray doctor`` |
| ``tests`` | ``pytest -m gpu``, without the next stage's |
| ``conformance`` | ``tests/engines/test_engine_conformance.py`` on CUDA |
| ``kernels``, ``numerics``, ``learner``, ``colocate``, ``iteration`` | the parts of ``benchmarks/gpu.py`` |
| ``example`` | an iteration of the example for one GPU: peak memory by phase |
| ``step_warm_up``, ``step`` | Qwen2.5-1.5B's shape in ALFWorld, 16 tasks × 8 rollouts × 50 turns: seconds of a step by phase |

Each stage writes its JSON when it ends; the next call of the same code skips every stage that has one. A stage that fails or
reaches its deadline does not keep the next ones from running. Nothing needs a network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import Measure
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from run_all import amount
from stages import (
    DEADLINE,
    FAILED,
    FOLDER,
    PASSED,
    ROOT,
    SKIPPED,
    Stage,
    finished_record,
    run_stage,
    source_digest,
)

from trial_ray.termination import termination_as_interrupt

OUT = {"cuda": ROOT / "benchmarks" / "results" / "gpu", "cpu": ROOT / "build" / "first_gpu_hour"}
GPU_PARTS = ("kernels", "numerics", "learner", "colocate", "iteration", "example", "step_warm_up", "step")
CONFORMANCE = "tests/engines/test_engine_conformance.py"
COLOURS = {PASSED: "green", FAILED: "red", DEADLINE: "red", SKIPPED: "yellow"}
MEASURES_SHOWN = 3
SHOWN_LINES = 15


def all_stages(device: str) -> list[Stage]:
    """Every stage, in order: what the later ones rest on comes first."""
    small = ("--small",) if device == "cpu" else ()
    here = ("--device", device, *small, "--json", FOLDER)
    return [
        Stage("environment", script("gpu_environment.py", "--device", device, "--json", f"{FOLDER}/environment.json")),
        Stage("tests", recorded("tests", "-m", "gpu", "tests", f"--ignore={CONFORMANCE}")),
        # A rehearsal has no GPU: the same file on the CPU.
        Stage("conformance", recorded("conformance", "-m", "gpu" if device == "cuda" else "not gpu", CONFORMANCE)),
        *(Stage(part, script("gpu.py", part, *here)) for part in GPU_PARTS),
    ]


def script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "benchmarks" / name), *arguments)


def recorded(name: str, *arguments: str) -> tuple[str, ...]:
    return script("recorded_tests.py", f"{FOLDER}/{name}.json", *arguments)


def run_stages(
    stages: Sequence[Stage], out: Path, device: str, console: Console, again: bool = False
) -> dict[str, dict[str, Any]]:
    """Run the stages that have no JSON of this code yet; returns the records of all by name.

    Args:
        stages: in order.
        out: folder of the JSON files.
        device: ``"cuda"`` or ``"cpu"``.
        console: for progress.
        again: run those too that have a JSON.
    """
    source, records = source_digest(), {}
    for stage in stages:
        record = None if again else finished_record(stage, out, device, source)
        if record is not None:
            console.print(f"== {stage.name}: {record['stage']['status']} on {record['stage']['ended']}, not repeated")
        else:
            console.print(f"== {stage.name}: at most {stage.deadline_s:.0f} s, output in {out / stage.name}.log")
            record = run_stage(stage, out, device, source)
            about = record["stage"]
            console.print(f"== {stage.name}: {about['status']} after {about['seconds']:.0f} s")
            if about["status"] in (FAILED, DEADLINE):
                console.print("\n".join(about["output_tail"][-SHOWN_LINES:]), markup=False, highlight=False)
        records[stage.name] = record
    return records


def result_of(record: dict[str, Any]) -> str:
    """A stage's first measures, its tests by outcome, how far it came, or why it was skipped."""
    details = record["details"]
    measures = [Measure.from_json(each) for each in record["measures"]][:MEASURES_SHOWN]
    lines = [f"{each.name}: {amount(each.figure, each.unit)} {each.verdict}".rstrip() for each in measures]
    if counts := details.get("counts"):
        lines.append(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if unfinished := details.get("unfinished"):
        lines += [f"{name} {phase['seconds']:.1f} s" for name, phase in details["phases"].items()]
        lines.append(f"stopped during {unfinished}")
    if (update := details.get("update")) and update["expected_seconds"] is not None:
        lines.append(
            f"{update['steps_done']} of {update['steps']} steps, {update['expected_seconds']:.0f} s expected of all"
        )
    return "\n".join([*lines, *([details["reason"]] if "reason" in details else []), *details.get("problems", [])])


def table_of(records: dict[str, dict[str, Any]]) -> Table:
    table = Table("stage", "seconds", "", "result", "to do", title="First hour on a GPU")
    for name, record in records.items():
        about = record["stage"]
        status = f"[{COLOURS[about['status']]}]{about['status']}[/]"
        table.add_row(name, f"{about['seconds']:.0f}", status, escape(result_of(record)), escape(about["suggestion"]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="run these, even where their results are there")
    parser.add_argument("--device", choices=tuple(OUT), default="cuda", help="cpu: a rehearsal at the smallest sizes")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the JSON files and logs")
    args = parser.parse_args()
    stages = all_stages(args.device)
    names = [stage.name for stage in stages]
    if unknown := sorted(set(args.stages) - set(names)):
        parser.error(f"unknown stages: {', '.join(unknown)}; expected some of: {', '.join(names)}")
    chosen = [stage for stage in stages if not args.stages or stage.name in args.stages]
    console = Console(width=None if sys.stdout.isatty() else 160)
    with termination_as_interrupt():
        records = run_stages(chosen, args.out or OUT[args.device], args.device, console, again=bool(args.stages))
    console.print(table_of(records))
    sys.exit(1 if any(record["stage"]["status"] in (FAILED, DEADLINE) for record in records.values()) else 0)


if __name__ == "__main__":
    main()

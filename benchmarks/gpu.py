"""What only a GPU can show, in parts of at most ten minutes.

    python benchmarks/gpu.py --json benchmarks/results/gpu

| part | measures |
| --- | --- |
| ``kernels`` | attention over prefix trees by FlexAttention against flash attention over the same rows: speed, gradient |
| ``learner`` | model FLOPs utilisation of the learner, SmolLM2-135M's shape and Qwen3-1.7B's, bfloat16 |
| ``colocate`` | engine and learner on one device: falling asleep, waking, sending weights |
| ``iteration`` | one iteration of TRIAL in generated ALFWorld games, end to end |
| ``example`` | an iteration of the example for one GPU: peak memory by phase |
| ``step_warm_up``, ``step`` | Qwen2.5-1.5B's shape in ALFWorld, 16 tasks × 8 rollouts × 50 turns: seconds by phase |
| ``numerics`` | log-probabilities and gradients of trees in bfloat16 and float32 against one row at a time in float32 |

Each part runs in a process of its own and writes ``PART.json`` into the folder. Nothing is downloaded: models have random weights
in the shapes of the real ones. Without CUDA it says so and exits with status 2; ``--device cpu --small`` runs every part's code on
the CPU at sizes at which only the code is of interest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import torch
from gpu_models import Setup
from measure import write_report

PARTS = {
    "kernels": "gpu_kernels",
    "learner": "gpu_learner",
    "colocate": "gpu_run",
    "iteration": "gpu_run",
    "numerics": "gpu_learner",
    "example": "gpu_step",
    "step_warm_up": "gpu_step",
    "step": "gpu_step",
}
TIMEOUT_S = 590.0


def run_part(part: str, device: str, small: bool, folder: Path | None) -> None:
    """Measure in this process."""
    file = folder / f"{part}.json" if folder else None
    measures, details = getattr(import_module(PARTS[part]), part)(Setup(torch.device(device), small, file))
    write_report(file, measures, details)


def run_parts(parts: list[str], arguments: list[str]) -> list[str]:
    """Each part in a process of its own, which gives the GPU's memory back; returns those that failed."""
    failed = []
    for part in parts:
        print(f"\n== {part}", flush=True)
        command = [sys.executable, str(Path(__file__).resolve()), part, *arguments]
        try:
            status = subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"{part} took more than {TIMEOUT_S:.0f} s and was stopped", flush=True)
            status = 1
        failed += [part] if status else []
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "parts", nargs="*", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--json", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="the smallest sizes: only whether everything runs")
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"unknown parts: {', '.join(unknown)}; expected some of: {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} finds no CUDA device, and these measurements need one. Run them on a machine with a GPU; "
            "--device cpu --small only tries whether the code runs.",
            file=sys.stderr,
        )
        sys.exit(2)
    if len(args.parts) == 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        run_part(args.parts[0], args.device, args.small, args.json)
        return
    arguments = ["--device", args.device, *(["--json", str(args.json)] if args.json else [])]
    if failed := run_parts(args.parts, arguments + (["--small"] if args.small else [])):
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

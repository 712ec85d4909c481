"""What a GPU run rests on: driver, GPUs, versions, compiler and headers, and the checks of ``trial-ray doctor``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import write_report

from trial_ray.cli.doctor import STOPS, machine_checks, missing_for_triton, package_checks
from trial_ray.planning.step_time import installed_gpus


def examine(device: str) -> dict[str, Any]:
    """Facts, and under ``problems`` what would keep the other stages from running, one line each."""
    gpus, failure = installed_gpus()
    checks = [*package_checks(), *machine_checks()]
    problems = [f"{check.name}: {check.found}. {check.fix}" for check in checks if check.level == STOPS]
    if device == "cuda" and not torch.cuda.is_available():
        problems.append(f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU. {failure}".rstrip())
    return {
        "gpus": [asdict(gpu) for gpu in gpus],
        "torch_cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
        "missing_for_triton": missing_for_triton(),
        "doctor": [asdict(check) for check in checks],
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    details = examine(args.device)
    write_report(args.json, [], details)
    for problem in details["problems"]:
        print(problem)
    sys.exit(1 if details["problems"] else 0)


if __name__ == "__main__":
    main()

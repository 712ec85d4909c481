"""What a run and a sweep take beside their work: start, end, and the change from one trial to the next.

    python benchmarks/bench_start.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/bench_start.py  # as on a processor without AVX-512

Each command is a process of its own, as a user starts it, on a few of the quickstart's games with its policy; Ray is local. A
first, uncounted run of each engine warms the disk's cache.

- **start**: from the command to the beginning of the first iteration, with either engine, and from the last iteration to the exit.
- **sweep**: 4 trials of 3 iterations, one at a time, and a population of 3 with 4 iterations each that is changed after each
  iteration: wall time, the share of it in which iterations run, and the longest time from one trial's last to the next one's first.

Leaves out: installation, panels, warm starts, GPUs, clusters.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from measure import Measure, write_report

COMMAND = Path(sys.executable).with_name("trial-ray")
QUICKSTART = Path(__file__).parents[1] / "tuned_examples" / "alfworld_quickstart.py"
RUN = f"""
import runpy

config = runpy.run_path({str(QUICKSTART)!r})["config"].evaluation(evaluation_split=None).training(
    tasks_per_iteration=4, group_size=4, hindsight_start_iteration=1
)
stop = {{"training_iteration": 1}}
"""
SWEEP = (
    RUN
    + """
from ray import tune

config = config.engines(engine="transformers").training(lr=tune.grid_search([1e-4, 2e-4, 4e-4, 8e-4]))
stop = {"training_iteration": 3}
max_concurrent_trials = 1
"""
)
POPULATION = (
    RUN
    + """
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

config = config.engines(engine="transformers").training(lr=tune.loguniform(1e-4, 1e-3))
stop = {"training_iteration": 4}
num_samples = 3
scheduler = PopulationBasedTraining(
    time_attr="training_iteration", perturbation_interval=1, quantile_fraction=0.34,
    hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-3)},
)
"""
)
START_S = {"transformers": 20.0, "vllm": 30.0}
"""Targets of the time to the first iteration."""
END_S = NEXT_TRIAL_S = 5.0
ITERATION = re.compile(r"(?:(\w+)  )?iteration (\d+)")
"""How the line of an iteration begins: that of a run, or with the trial of a sweep."""


def run(command: str, text: str, folder: Path, *arguments: str) -> tuple[float, float, list[tuple[float, float]]]:
    """Write the experiment and run it to its end.

    Returns:
        Seconds of the clock at the start and at the exit, and of the beginning and the end of each iteration, in order.

    Raises:
        RuntimeError: the command failed; its output is the message.
    """
    folder.mkdir(parents=True)
    file, out = folder / "experiment.py", folder / "out"
    file.write_text(text, encoding="utf-8")
    began, lines = time.time(), []
    with subprocess.Popen(
        [str(COMMAND), command, str(file), "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
    ) as process:
        for line in process.stdout or ():
            lines.append((time.time(), line))
    exited = time.time()
    if process.returncode:
        raise RuntimeError("".join(line for _, line in lines))
    took = {
        (each.get("trial_id", ""), each["training_iteration"]): each["time_this_iter_s"]
        for results in (*out.glob("TRIAL_*/result.json"), *out.glob("metrics.jsonl"))
        for each in map(json.loads, results.read_text(encoding="utf-8").splitlines())
    }
    # Ray rounds the times of results to whole seconds; the line of an iteration is printed when it ends.
    ends = [((each[1] or "", int(each[2])), moment) for moment, line in lines if (each := ITERATION.match(line))]
    # A member of a population that copies another gives up its own results.
    usual = statistics.median(took.values())
    played = [(moment - took.get(key, usual), moment) for key, moment in ends]
    print(
        f"{command} in {exited - began:.1f} s: {[tuple(round(each - began, 1) for each in pair) for pair in played]}",
        flush=True,
    )
    return began, exited, played


def start_and_end(engine: str, folder: Path) -> dict[str, float]:
    """Seconds of a run of one iteration."""
    began, exited, [(first, last)] = run("train", RUN, folder, "--set", f"engine={engine}")
    return {"start_s": first - began, "iteration_s": last - first, "end_s": exited - last, "wall_s": exited - began}


def sweep(text: str, folder: Path) -> dict[str, float]:
    """Seconds of a sweep, and the longest time in which no trial was in an iteration."""
    began, exited, played = run("sweep", text, folder)
    work = sum(end - begin for begin, end in played)
    return {
        "wall_s": exited - began,
        "start_s": played[0][0] - began,
        "work_s": work,
        "iterations": len(played),
        "longest_change_s": max(later[0] - earlier[1] for earlier, later in pairwise(played)),
        "end_s": exited - played[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for engine in START_S:
            start_and_end(engine, folder / f"uncounted-{engine}")
            found[engine] = start_and_end(engine, folder / engine)
        found["sweep"] = sweep(SWEEP, folder / "sweep")
        found["population"] = sweep(POPULATION, folder / "population")
    units = torch.backends.cpu.get_cpu_capability()
    measures = []
    for engine, target in START_S.items():
        each = found[engine]
        note = f"of {each['wall_s']:.0f} s, the iteration {each['iteration_s']:.1f} s; {units}"
        measures += [
            Measure(f"until the first iteration, {engine} engine", each["start_s"], "s", target, "lower", note),
            Measure(f"from the last iteration to the exit, {engine} engine", each["end_s"], "s", END_S, "lower"),
        ]
    for name, title in (
        ("sweep", "sweep of 4 trials × 3 iterations"),
        ("population", "population of 3 × 4 iterations"),
    ):
        each = found[name]
        note = f"{each['iterations']:.0f} iterations of {each['work_s'] / each['iterations']:.1f} s; {units}"
        measures += [
            Measure(f"{title}: wall time", each["wall_s"], "s", note=note),
            Measure(f"{title}: share of it in iterations", each["work_s"] / each["wall_s"], ""),
            Measure(f"{title}: longest change to another trial", each["longest_change_s"], "s", NEXT_TRIAL_S, "lower"),
        ]
    write_report(args.json, measures, found)


if __name__ == "__main__":
    main()

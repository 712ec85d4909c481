"""Digests of the quickstart's iterations, which a refactoring must not change.

    python benchmarks/golden_run.py --json before.json      # at the commit before, on the same machine
    python benchmarks/golden_run.py --json after.json --compare before.json

The quickstart runs with one learner in the driver, and with two learners in actors. With ``max_staleness=0``, the digests are of
weights, optimizer state and metrics. With ``max_staleness=1``, the weights that sample a response depend on timing, so the script
only counts the rollouts whose task, seed and index do not occur in the run with ``max_staleness=0``. The exit code is 1 if digests
or counts differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
from measure import ray_cluster

ITERATIONS = (5, 3)
"""Number of iterations by ``max_staleness``. With 1, three iterations may draw as many groups as five iterations with 0."""
PLAYED = ["task_id", "seed", "rollout_index"]
MEASURED = (
    "time",
    "second",
    "timestamp",
    "date",
    "memory",
    "throughput",
    "pid",
    "hostname",
    "node_ip",
    "_per_s",
    "busy",
    "trial_id",
)
"""Parts of the names of metrics that measure the machine or name the process."""


def config(staleness: int, learners: int, trajectories: Path) -> Any:
    """Return the quickstart's config with 4 tasks of 4 rollouts, hindsight from iteration 1, and one request at a time."""
    from trial_ray.runs.experiment import load_experiment

    quickstart = load_experiment(Path(__file__).parents[1] / "tuned_examples" / "alfworld_quickstart.py").config
    quickstart.training(
        group_size=4, tasks_per_iteration=4, minibatch_rows=40, microbatch_rows=20, hindsight_start_iteration=1
    )
    if staleness:
        quickstart.training(importance_cap=2.0)
    return (
        quickstart.env_runners(
            num_env_runners=1, num_cpus_per_env_runner=0.25, max_staleness=staleness, seeded_sampling=True
        )
        .engines(engine="transformers", num_cpus_per_engine=0.25, engine_kwargs={"max_batch": 1, "num_threads": 1})
        .learners(num_learners=learners, num_cpus_per_learner=0.25)
        .resources(num_cpus_for_main_process=0.25)
        .recording(trajectories_folder=str(trajectories))
    )


def digest(value: Any) -> str:
    """Return a digest of arrays, numbers and texts in dicts and lists, without entries whose names contain :data:`MEASURED`."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for name in sorted(value, key=str):
                if not any(part in str(name) for part in MEASURED):
                    found.update(str(name).encode())
                    add(value[name])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        elif hasattr(value, "detach"):
            found.update(value.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(value, np.ndarray):
            found.update(value.tobytes())
        elif not callable(value):
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


def run(staleness: int, learners: int, trajectories: Path) -> tuple[list[dict[str, str]], set[tuple[Any, ...]]]:
    """Return the digests of each iteration, and the task, seed and index in its group of every rollout."""
    algorithm, digests = config(staleness, learners, trajectories).build_algo(), []
    try:
        for _ in range(ITERATIONS[staleness]):
            result = algorithm.train()
            state = algorithm.learner_group.get_state(components="learner")["learner"]
            metrics = {name: result[name] for name in ("env_runners", "learners")}
            digests.append(
                {
                    "weights": digest(state["rl_module"]),
                    "optimizer": digest(state["optimizer"]),
                    "metrics": digest(metrics),
                }
            )
    finally:
        algorithm.stop()
    played = pyarrow.dataset.dataset(trajectories, format="parquet").to_table(columns=PLAYED)
    return digests, {tuple(row.values()) for row in played.to_pylist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="digests of the commit before")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = {}
    with ray_cluster(4) as folder:
        for learners in (0, 2):
            digests, drawn = run(0, learners, Path(folder, f"{learners}-0"))
            _, overlapped = run(1, learners, Path(folder, f"{learners}-1"))
            found[f"staleness 0, {learners} learners"] = digests
            found[f"staleness 1, {learners} learners, rollouts of other tasks or seeds"] = len(overlapped - drawn)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(args.json.read_text())
    if args.compare and found != json.loads(args.compare.read_text()):
        sys.exit(f"They differ from those of {args.compare}.")


if __name__ == "__main__":
    main()

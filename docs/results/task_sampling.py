"""Task sampling by success rate against uniform task sampling: the trials of tuned_examples/sweeps/task_sampling.py.

python docs/results/task_sampling.py DIR     # writes task_sampling.json, out of the folder of the finished sweep
python docs/results/task_sampling.py         # prints the table
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import numpy as np

from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import EVALUATION, LEARNER
from trial_ray.runs.metric_files import read_metrics

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/task_sampling_runs", 1
PRIMARY = ("area", "success")
TITLES = {
    "area": "mean success of the evaluations, %",
    "success": "success of the last evaluation, %",
    "with_variance": "groups whose rollouts differ in return, %",
}


def row_of(trial: Path) -> dict:
    """Measures of one trial."""
    metrics, _ = read_metrics(trial / "metrics.jsonl")
    settings = read_json(trial / "resolved_config.json")["settings"]
    played = [line[f"{EVALUATION}success_rate"] for line in metrics if f"{EVALUATION}success_rate" in line]
    return {
        "task_sampling": settings["task_sampling"],
        "seed": settings["seed"],
        "iterations": len(metrics),
        "evaluations": len(played),
        "area": fmean(played),
        "success": played[-1],
        "with_variance": 1 - fmean(line["groups/zero_variance_fraction"] for line in metrics),
        "rows_sampled": sum(line["rows/sampled"] for line in metrics),
        "rows_trained": sum(line[f"{LEARNER}num_module_steps_trained"] for line in metrics),
    }


def table(rows: list[dict]) -> list[str]:
    """Rows of the table: means, and the difference by seed with its t interval; Holm's adjustment is over the primary two."""
    found = {}
    for measure in TITLES:
        values = {(row["task_sampling"], row["seed"]): 100 * row[measure] for row in rows}
        seeds = sorted({row["seed"] for row in rows})
        pairs = np.array([[values[name, seed] for name in ("uniform", "success_rate")] for seed in seeds])
        found[measure] = (*pairs.mean(0), seed_interval(pairs[:, 1] - pairs[:, 0]))
    adjusted = dict(zip(PRIMARY, holm([found[measure][2].p_value for measure in PRIMARY]), strict=True))
    return [
        f"| {title} | {uniform:.1f} | {by_rate:.1f} | {by_rate - uniform:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}] | "
        f"{interval.p_value:.2g} | {f'{adjusted[measure]:.2g}' if measure in adjusted else ''} |"
        for measure, title in TITLES.items()
        for uniform, by_rate, interval in [found[measure]]
    ]


if __name__ == "__main__":
    if sys.argv[1:]:
        trials = sorted(path.parent for path in Path(sys.argv[1]).glob("*/metrics.jsonl"))
        runs = sorted(map(row_of, trials), key=lambda row: (row["seed"], row["task_sampling"]))
        print(write_json(FILE, {"schema": SCHEMA, "schema_version": VERSION, "runs": runs}))
    print("\n".join(table(read_json(FILE, SCHEMA, VERSION)["runs"])))

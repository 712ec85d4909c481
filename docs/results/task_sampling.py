"""Task sampling by success rate against uniform task sampling: the trials of tuned_examples/sweeps/task_sampling.py.

python docs/results/task_sampling.py DIR     # writes task_sampling.json from the folder of the finished sweep
python docs/results/task_sampling.py         # prints the table in docs/results.md, and figures in the text below it
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas

from trial_ray.algorithms.tasks import DECAY, PRIOR
from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import EVALUATION, LEARNER
from trial_ray.runs.metrics_file import read_metrics

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/task_sampling_runs", 1
BINS = (0.0, 0.1, 0.16, 0.21, 0.24, 1.0)
PRIMARY = ("area", "success")
TITLES = {
    "area": "mean success of the evaluations, %",
    "success": "success of the last evaluation, %",
    "with_variance": "groups whose rollouts differ in return, %",
}


def row_of(trial: Path) -> dict:
    """Return the measures of one trial."""
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
        "train_success_by_quarter": _quarters(metrics, "env_runners/success_rate"),
        "zero_variance_by_quarter": _quarters(metrics, "groups/zero_variance_fraction"),
        "effective_fraction": metrics[-1].get("tasks/effective_fraction"),
        **draws(trial),
        "rows_sampled": sum(line["rows/sampled"] for line in metrics),
        "rows_trained": sum(line[f"{LEARNER}num_module_steps_trained"] for line in metrics),
    }


def _quarters(metrics: list[dict], name: str) -> list[float]:
    size = len(metrics) // 4
    return [fmean(line[name] for line in metrics[start : start + size]) for start in range(0, 4 * size, size)]


def draws(trial: Path) -> dict:
    """Return the number of drawn tasks, the maximum number of draws of a task, and counts of groups by p (1 − p).

    p is the success rate that the sampler estimates for a task before a group. ``next_groups`` has, for each bin of
    :data:`BINS`, the number of groups and the number of groups whose rollouts differ in success.
    """
    drawn: Counter[str] = Counter()
    counts: dict[str, np.ndarray] = {}
    found = np.zeros((len(BINS) - 1, 2), int)
    for folder in sorted((trial / "trajectories").iterdir(), key=lambda path: int(path.name.partition("=")[2])):
        columns = ["group_id", "task_id", "rollout_index", "success"]
        frame = pandas.concat(
            pandas.read_parquet(file, columns=columns, partitioning=None) for file in folder.iterdir()
        )
        groups = frame.drop_duplicates(["group_id", "rollout_index"]).groupby(["group_id", "task_id"])["success"]
        for (_, task), won in groups:
            drawn[task] += 1
            if task in counts:
                successes, failures = counts[task] + PRIOR
                place = np.searchsorted(BINS, successes * failures / (successes + failures) ** 2, "right") - 1
                found[place] += (1, won.nunique() > 1)
            counts[task] = DECAY * counts.get(task, np.zeros(2)) + (won.sum(), (~won).sum())
    return {"tasks_drawn": len(drawn), "most_draws": max(drawn.values()), "next_groups": found.tolist()}


def details(rows: list[dict]) -> Iterator[str]:
    """Yield lines with the figures in the text below the table, mostly means over seeds."""
    for name in ("uniform", "success_rate"):
        own = [row for row in rows if row["task_sampling"] == name]
        for key in ("train_success_by_quarter", "zero_variance_by_quarter"):
            yield f"{name}, {key}: {np.round(np.mean([row[key] for row in own], 0), 3).tolist()}"
        groups = np.sum([row["next_groups"] for row in own], 0)
        shares = ", ".join(
            f"from {low}: {part / size:.0%} of {size}" for low, (size, part) in zip(BINS, groups, strict=False)
        )
        yield f"{name}, groups that differ by p(1 - p): {shares}"
        most = max(row["most_draws"] for row in own)
        yield f"{name}, tasks drawn: {fmean(row['tasks_drawn'] for row in own):.1f}, at most {most} times"
        if name != "uniform":
            yield f"{name}, effective fraction: {fmean(row['effective_fraction'] for row in own):.3f}"
    counts = sorted(row["rows_sampled"] for row in rows)
    yield f"rows sampled: {counts[0]} to {counts[-1]}, all trained: {all(r['rows_sampled'] == r['rows_trained'] for r in rows)}"


def table(rows: list[dict]) -> list[str]:
    """Return the table's rows: means, difference paired by seed with t interval, and p, adjusted (Holm) over :data:`PRIMARY`."""
    found = {}
    for measure in TITLES:
        values = {(row["task_sampling"], row["seed"]): 100 * row[measure] for row in rows}
        seeds = sorted({row["seed"] for row in rows})
        pairs = np.array([[values[name, seed] for name in ("uniform", "success_rate")] for seed in seeds])
        found[measure] = (*pairs.mean(0), seed_interval(pairs[:, 1] - pairs[:, 0]))
    adjusted = dict(zip(PRIMARY, holm([found[measure][2].p_value for measure in PRIMARY]), strict=True))
    lines = [
        f"| {title} | {uniform:.1f} | {by_rate:.1f} | {by_rate - uniform:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}] | "
        f"{interval.p_value:.2g} | {f'{adjusted[measure]:.2g}' if measure in adjusted else '–'} |"
        for measure, title in TITLES.items()
        for uniform, by_rate, interval in [found[measure]]
    ]
    return [line.replace("-", "−") for line in lines]


if __name__ == "__main__":
    if sys.argv[1:]:
        trials = sorted(path.parent for path in Path(sys.argv[1]).glob("*/metrics.jsonl"))
        runs = sorted(map(row_of, trials), key=lambda row: (row["seed"], row["task_sampling"]))
        print(write_json(FILE, {"schema": SCHEMA, "schema_version": VERSION, "runs": runs}))
    rows = read_json(FILE, SCHEMA, VERSION)["runs"]
    print("\n".join([*table(rows), *details(rows)]))

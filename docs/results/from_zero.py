"""Ways to use a stronger policy, against GRPO alone with the same seeds.

python docs/results/from_zero.py NAME=DIR ...   # writes the trials of sweeps (tuned_examples/sweeps/from_zero.py) to from_zero.json
python docs/results/from_zero.py                # prints the table

NAME is a key of TITLES, and DIR the folder of its sweep. With `smollm2=DIR`, the trials of the sweep from_zero_smollm2.py are
written to from_zero_smollm2.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np

from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import EVALUATION, LEARNER, TRAINING_SUCCESS
from trial_ray.runs.metrics_file import read_metrics

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/from_zero_runs", 1
TITLES = {
    "grpo": "GRPO",
    "rft": "RFT",
    "tuned": "SFT, then GRPO",
    "opd": "OPD",
    "opd_grpo": "OPD + GRPO",
}
REFERENCE = "grpo"
MEASURES = ("area", "success")


def row_of(name: str, trial: Path) -> dict:
    """Return the measures of one trial."""
    metrics, _ = read_metrics(trial / "metrics.jsonl")
    return {
        "method": name,
        "seed": read_json(trial / "resolved_config.json")["settings"]["seed"],
        "iterations": len(metrics),
        "rollouts": sum(line["env_runners/num_episodes"] for line in metrics),
        "first": metrics[0][TRAINING_SUCCESS],
        "area": fmean(line[TRAINING_SUCCESS] for line in metrics),
        "success": metrics[-1][f"{EVALUATION}success_rate"],
        "rows_sampled": sum(line["rows/sampled"] for line in metrics),
        "rows_trained": sum(line[f"{LEARNER}num_module_steps_trained"] for line in metrics),
    }


def differences(rows: list[dict], name: str, measure: str) -> np.ndarray:
    """Return the differences to GRPO in points, one per seed that has both runs."""
    values = {(row["method"], row["seed"]): 100 * row[measure] for row in rows}
    seeds = [seed for method, seed in sorted(values) if method == name and (REFERENCE, seed) in values]
    return np.array([values[name, seed] - values[REFERENCE, seed] for seed in seeds])


def table(rows: list[dict]) -> Iterator[str]:
    """Yield one line per method, with Holm's adjustment over the methods of a measure."""
    others = [name for name in TITLES if name != REFERENCE and any(row["method"] == name for row in rows)]
    intervals = {
        (name, measure): seed_interval(differences(rows, name, measure)) for name in others for measure in MEASURES
    }
    adjusted = {}
    for measure in MEASURES:
        values = [intervals[name, measure].p_value for name in others]
        adjusted |= {(name, measure): p for name, p in zip(others, holm(values), strict=True)}
    for name in [REFERENCE, *others]:
        runs = [row for row in rows if row["method"] == name]
        cells = [TITLES[name], str(len(runs)), f"{100 * fmean(row['first'] for row in runs):.1f}"]
        for measure in MEASURES:
            cells.append(f"{100 * fmean(row[measure] for row in runs):.1f}")
            if name == REFERENCE:
                cells += ["", ""]
            else:
                interval, mean = intervals[name, measure], differences(rows, name, measure).mean()
                cells.append(f"{mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]")
                cells.append(f"{adjusted[name, measure]:.2g}")
        yield f"| {' | '.join(cells)} |".replace("-", "−")


if __name__ == "__main__":
    if sys.argv[1:]:
        sweeps = dict(argument.split("=", 1) for argument in sys.argv[1:])
        found = [row_of(name, file.parent) for name in sweeps for file in Path(sweeps[name]).glob("*/metrics.jsonl")]
        found.sort(key=lambda row: (list(sweeps).index(row["method"]), row["seed"]))
        file = FILE.with_stem("from_zero_smollm2") if [*sweeps] == ["smollm2"] else FILE
        print(write_json(file, {"schema": SCHEMA, "schema_version": VERSION, "runs": found}))
    known = read_json(FILE, SCHEMA, VERSION)["runs"]
    print("\n".join(table(known)))
    equal = all(row["rows_sampled"] == row["rows_trained"] for row in known)
    print(f"{len(known)} runs; {sum(row['rows_sampled'] for row in known):,.0f} rows sampled, all trained: {equal}")

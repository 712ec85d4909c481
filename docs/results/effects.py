"""Differences of methods in area under the learning curve and final success, by warm start and over warm starts.

python docs/results/effects.py               # writes effects.json from the *_runs.json beside this file
python docs/results/effects.py NAME DIR ...  # first writes NAME_runs.json from folders of finished studies (`trial-ray sweep`)

If several folders are given, their runs form a separate study, which is not compared with other runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import LEARNER, TRAINING_SUCCESS
from trial_ray.runs.metrics_file import read_metrics

HERE = Path(__file__).parent
RUNS, EFFECTS, VERSION = "trial_ray/study_runs", "trial_ray/effects", 1
PRIMARY = (("trial", "permuted"), ("trial", "uniform"))
"""Pairs whose difference tests whether the shape of the turn profile matters; Holm's adjustment is over these pairs."""
GATE = (("gated", "grpo"), ("gated", "trial"))
"""Pairs that test a gate, which set λ to 0 when TRIAL did harm; Holm's adjustment is over these pairs in a study."""
PAIRS = (*PRIMARY, ("trial", "grpo"), ("uniform", "grpo"), ("permuted", "grpo"), *GATE)
PLACE = ("study", "environment", "base_model")
MEASURES = ("area", "success")
SUMS = {"rows_sampled": "rows/sampled", "rows_trained": f"{LEARNER}num_module_steps_trained"}
MEANS = {
    "saturated": f"{LEARNER}trial/clamp_saturated_fraction",
    "entropy": f"{LEARNER}grpo/entropy",
}


def mixed_interval(differences: np.ndarray) -> dict[str, float]:
    """Return the mean of differences ``[warm starts, seeds]`` with its interval, by restricted maximum likelihood.

    The warm start is a random effect. If the variance between warm starts is not larger than the seeds explain, all differences
    are one sample; otherwise the means of the warm starts are the sample.
    """
    starts, seeds = differences.shape
    between, within = seeds * differences.mean(1).var(ddof=1), differences.var(1, ddof=1).mean()
    differing = between > within
    variance = between if differing else differences.var(ddof=1)
    degrees = starts - 1 if differing else differences.size - 1
    error, mean = math.sqrt(variance / differences.size), float(differences.mean())
    half = float(stats.t.ppf(0.975, degrees)) * error
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "p_value": float(2 * stats.t.sf(abs(mean) / error, degrees)) if error else float(mean == 0),
        "degrees": degrees,
        "between_std": math.sqrt((between - within) / seeds) if differing else 0.0,
        "within_std": math.sqrt(within if differing else variance),
    }


def runs_of(folder: Path, study: str | None, seeds: float = math.inf) -> list[dict]:
    """Return the area under the learning curve, the final success and the counts of every run with a seed below ``seeds``.

    If a health check stopped a run, the success of its missing iterations and its final success count as 0, because its policy
    no longer acted.
    """
    rows, trials = [], read_json(folder / "sweep.json")["trials"]
    iterations = max(trial["iterations"] for trial in trials)
    for trial in trials:
        chosen, run = trial["parameters"], folder / trial["name"]
        if chosen["seed"] >= seeds:
            continue
        metrics, _ = read_metrics(run / "metrics.jsonl")
        played = [EvaluationResult.load(file).success_rate for file in (run / "evaluations").glob("*.json")]
        row = {"study": study} if study else {}
        row |= {"environment": chosen["environment"], "warm_start": chosen["backbone"], "method": chosen["method"]}
        settings = json.loads((run / "resolved_config.json").read_text())["settings"]
        row["base_model"] = (settings["warm_start"] or {}).get("model_path")
        row |= {"seed": chosen["seed"], "area": sum(line[TRAINING_SUCCESS] for line in metrics) / iterations}
        if not played and "Stopped after iteration" not in trial["error"]:
            raise ValueError(f"{trial['name']} was not evaluated, and no health check stopped it: {trial['error']}")
        row["success"] = statistics.fmean(played or [0.0])
        for names, reduce in ((SUMS, sum), (MEANS, statistics.fmean)):
            found = {short: [line[key] for line in metrics if key in line] for short, key in names.items()}
            row |= {short: reduce(values) for short, values in found.items() if values}
        rows.append(row)
    return rows


def effects(rows: list[dict]) -> list[dict]:
    """Return the differences of all :data:`PAIRS`, paired by seed.

    Every study, environment, base model, pair and measure has one entry per warm start with at least two seeds, with the t
    interval over seeds. If several warm starts have the same seeds, an entry of the mixed model follows (``warm_start`` is
    ``None``). Warm starts of a language model and of a small model are not pooled, because they do not vary around one mean.
    """
    found = []
    for key in dict.fromkeys(map(_place, rows)):
        own = [row for row in rows if _place(row) == key]
        place = {name: value for name, value in zip(PLACE, key, strict=True) if value is not None}
        for measure in MEASURES:
            made = [entry for pair in PAIRS for entry in _of_pair(own, *pair, measure)]
            pooled = [
                each for each in made if not each["warm_start"] and (each["method"], each["reference"]) in PRIMARY
            ]
            for entry, adjusted in zip(pooled, holm([each["p_value"] for each in pooled]), strict=True):
                entry["p_holm"] = adjusted
            found += [{**place, "measure": measure, **entry} for entry in made]
    for study, measure in product({row.get("study") for row in rows} - {None}, MEASURES):
        family = [each for each in found if (each.get("study"), each["measure"]) == (study, measure)]
        family = [each for each in family if (each["method"], each["reference"]) in GATE]
        for entry, adjusted in zip(family, holm([each["p_value"] for each in family]), strict=True):
            entry["p_holm"] = adjusted
    return found


def _place(row: dict) -> tuple:
    return tuple(row.get(name) for name in PLACE)


def _of_pair(rows: list[dict], one: str, other: str, measure: str) -> list[dict]:
    values = {(row["warm_start"], row["method"], row["seed"]): row[measure] for row in rows}
    pair, found, differences = {"method": one, "reference": other}, [], {}
    for start in dict.fromkeys(row["warm_start"] for row in rows):
        seeds = sorted(seed for own, method, seed in values if (own, method) == (start, one))
        seeds = tuple(seed for seed in seeds if (start, other, seed) in values)
        gained = np.array([values[start, one, seed] - values[start, other, seed] for seed in seeds])
        if (interval := seed_interval(gained)) is not None:
            differences[start, seeds] = gained
            mean = {"mean": float(gained.mean()), **dataclasses.asdict(interval)}
            found.append({**pair, "warm_start": start, "seeds": len(seeds), **mean})
    if len(differences) > 1 and len({seeds for _, seeds in differences}) == 1:
        array = np.array(list(differences.values()))
        pooled = {"warm_start": None, "warm_starts": len(array), "seeds": array.shape[1]}
        found.append({**pair, **pooled, **mixed_interval(array)})
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        name, *folders = sys.argv[1:]
        runs = [row for folder in folders for row in runs_of(Path(folder), name if len(folders) > 1 else None)]
        record = {"schema": RUNS, "schema_version": VERSION, "runs": runs}
        print(write_json(HERE / f"{name}_runs.json", record))
    every = [row for path in sorted(HERE.glob("*_runs.json")) for row in read_json(path, RUNS, VERSION)["runs"]]
    record = {"schema": EFFECTS, "schema_version": VERSION, "effects": effects(every)}
    print(write_json(HERE / "effects.json", record))

"""Effects: by how much one method's runs exceed another's, by environment and warm start, and over warm starts.

    python -m trial_ray.reproduction.effects DIR

reads every ``*_runs.json`` in DIR, which ``trial-ray reproduce`` writes, and makes ``effects.json`` and its picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trial_ray.algorithms.methods import method_title
from trial_ray.errors import UserInputError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import holm, mixed_interval, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import LEARNER, TRAINING_SUCCESS
from trial_ray.reports.charts import curve
from trial_ray.reports.plots import FORMATS, forest
from trial_ray.reproduction.studies import PlannedRun
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.metric_files import read_metrics

RUNS, EFFECTS, VERSION = "trial_ray/study_runs", "trial_ray/effects", 1
"""Schemas of the files, and their version."""
PRIMARY = (("trial", "permuted"), ("trial", "uniform"))
"""Methods whose difference says whether the profile's shape matters; Holm's adjustment is over them."""
PAIRS = (*PRIMARY, ("trial", "grpo"), ("uniform", "grpo"), ("permuted", "grpo"))
MEASURES = {"area": "area under the learning curve", "success": "final success"}
SUMS = {"rows_sampled": "rows/sampled", "rows_trained": f"{LEARNER}num_module_steps_trained"}
"""Metrics that are added over a run's iterations, by their names in the file."""
MEANS = {
    "saturated": f"{LEARNER}trial/clamp_saturated_fraction",
    "entropy": f"{LEARNER}grpo/entropy",
    "seconds_sampling": "seconds/sampling",
    "seconds_scoring": f"{LEARNER}scoring/seconds",
    "seconds_update": f"{LEARNER}update/seconds",
    "seconds_sync": "seconds/sync",
}
"""Metrics of which the file has a run's mean."""


def write_runs(name: str, runs: Sequence[PlannedRun], folder: Path) -> Path:
    """Write ``NAME_runs.json``: area under the learning curve, final success, counts and seconds of every run.

    Args:
        name: of the study.
        runs: that are done.
        folder: where the file goes.
    """
    rows = []
    for run in runs:
        metrics, _ = read_metrics(RunFolder(run.folder).metrics)
        rates = [EvaluationResult.load(run.evaluation(evaluated)).success_rate for evaluated in run.sets]
        row: dict[str, Any] = {"environment": run.environment, "warm_start": run.backbone, "method": run.method}
        row["base_model"] = run.config.model_path or (run.config.warm_start or {}).get("model_path")
        row |= {"seed": run.seed, "area": statistics.fmean(curve(metrics, TRAINING_SUCCESS).values())}
        row["success"] = statistics.fmean(rates)
        found = {key: [line[key] for line in metrics if key in line] for key in (*SUMS.values(), *MEANS.values())}
        row |= {short: sum(found[key]) for short, key in SUMS.items() if found[key]}
        row |= {short: statistics.fmean(found[key]) for short, key in MEANS.items() if found[key]}
        rows.append(row)
    return write_json(folder / f"{name}_runs.json", {"schema": RUNS, "schema_version": VERSION, "runs": rows})


def write_effects(folder: Path) -> list[Path]:
    """Make ``effects.json`` and ``effects.png`` of all ``*_runs.json`` in ``folder``; returns the files, none without effects.

    Raises:
        CheckpointError: a file is damaged.
        UserInputError: a run occurs twice.
    """
    rows = [row for path in sorted(folder.glob("*_runs.json")) for row in read_json(path, RUNS, VERSION)["runs"]]
    found = effects(rows)
    if not found:
        return []
    data = {"schema": EFFECTS, "schema_version": VERSION, "effects": found}
    pictures = [folder / f"effects.{kind}" for kind in FORMATS]
    forest(found, MEASURES, method_title, pictures)
    return [write_json(folder / "effects.json", data), *pictures]


def effects(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Differences of all :data:`PAIRS`, paired by seed.

    Args:
        rows: runs, as :func:`write_runs` writes them.

    Returns:
        For every environment, base model, pair and measure one entry a warm start, with the t interval over seeds; and, where
        several warm starts have the same seeds, one with the interval of a mixed model (``warm_start`` is ``None``). Pairs of
        which no warm start has two seeds are left out.

    Raises:
        UserInputError: a run occurs twice.
    """
    found: list[dict[str, Any]] = []
    for (environment, base_model), starts in _by_start(rows).items():
        place = {"environment": environment} | ({} if base_model is None else {"base_model": base_model})
        for measure in MEASURES:
            own = [entry for one, other in PAIRS for entry in _of_pair(starts, one, other, measure)]
            _adjust([entry for entry in own if entry["warm_start"] is None])
            found += [{**place, "measure": measure, **entry} for entry in own]
    return found


_Starts = Mapping[str, Mapping[str, Mapping[int, Mapping[str, Any]]]]
"""Runs by warm start, method and seed."""


def _by_start(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str | None], _Starts]:
    """By environment and base model: warm starts of a language model and of a small one do not vary around one mean."""
    found: dict[tuple[str, str | None], Any] = {}
    for row in rows:
        starts = found.setdefault((row["environment"], row.get("base_model")), {})
        by_seed = starts.setdefault(row["warm_start"], {}).setdefault(row["method"], {})
        if by_seed.setdefault(int(row["seed"]), row) is not row:
            raise UserInputError(
                f"Seed {row['seed']} of {row['method']} from {row['warm_start']} in {row['environment']} occurs twice. Leave "
                "one of the files out."
            )
    return found


def _of_pair(starts: _Starts, one: str, other: str, measure: str) -> list[dict[str, Any]]:
    """Entries of one pair: of every warm start with two seeds or more, then over warm starts, where these have the same seeds."""
    pair, found, differences = {"method": one, "reference": other}, [], {}
    for start, methods in starts.items():
        ours, theirs = methods.get(one, {}), methods.get(other, {})
        seeds = tuple(sorted(ours.keys() & theirs.keys()))
        values = np.array([ours[seed][measure] - theirs[seed][measure] for seed in seeds])
        if (over_seeds := seed_interval(values)) is not None:
            differences[start, seeds] = values
            mean = {"mean": float(values.mean()), **dataclasses.asdict(over_seeds)}
            found.append({**pair, "warm_start": start, "seeds": len(seeds), **mean})
    if len(differences) > 1 and len({seeds for _, seeds in differences}) == 1:
        array = np.array(list(differences.values()))
        pooled = {"warm_start": None, "warm_starts": len(array), "seeds": array.shape[1]}
        found.append({**pair, **pooled, **mixed_interval(array).to_dict()})
    return found


def _adjust(pooled: Sequence[dict[str, Any]]) -> None:
    primary = [entry for entry in pooled if (entry["method"], entry["reference"]) in PRIMARY]
    p_values: list[float] = [entry["p_value"] for entry in primary]
    for entry, adjusted in zip(primary, holm(p_values), strict=True):
        entry["p_holm"] = adjusted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="with *_runs.json; effects.json goes there")
    for path in write_effects(parser.parse_args().folder):
        print(path)

"""The dose of hindsight: success by λ and α in four environments, against GRPO (λ = 0) with the same seeds.

python docs/results/dose.py DIR ...   # adds the trials of sweeps (tuned_examples/sweeps/dose_*.py) to dose.json
python docs/results/dose.py           # prints the tables, and draws dose.png
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np

from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import EVALUATION, LEARNER, TRAINING_SUCCESS
from trial_ray.runs.metrics_file import read_metrics

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/dose_runs", 1
ENVIRONMENTS = {
    "trial/ALFWorld-v0": "ALFWorld",
    "trial/WebShop-v0": "WebShop",
    "mine/Guessing-v0": "guessing",
    "mine/KeyRooms-v0": "key rooms",
}
DOSES = (0.003, 0.01, 0.03, 0.1)
MEASURES = ("area", "success")
AFTER = 3
"""Number of iterations with λ after which the entropy is compared."""
RUN = ("environment", "coefficient", "alpha", "seed")


def row_of(trial: Path) -> dict | None:
    """Return the measures of one trial, or ``None`` if it has not played its held-out games yet."""
    metrics, _ = read_metrics(trial / "metrics.jsonl")
    settings = read_json(trial / "resolved_config.json")["settings"]
    played = metrics[-1].get(f"{EVALUATION}success_rate") if metrics else None
    if played is None:
        return None
    start = settings["hindsight_start_iteration"]
    entropy = [line[f"{LEARNER}grpo/entropy"] for line in metrics]
    with_hindsight = [line for line in metrics if f"{LEARNER}trial/gradient_ratio" in line]
    return {
        "environment": ENVIRONMENTS[settings["env"]],
        "coefficient": settings["hindsight_coeff"],
        "alpha": settings["clamp_alpha"],
        "seed": settings["seed"],
        "start": start,
        "iterations": len(metrics),
        "area": fmean(line[TRAINING_SUCCESS] for line in metrics),
        "success": played,
        "entropy": entropy,
        "gradient_ratio": [line[f"{LEARNER}trial/gradient_ratio"] for line in with_hindsight],
        "update_kl_max": max(line.get(f"{LEARNER}grpo/update_kl", 0.0) for line in metrics),
        "iterations_without_success": sum(line[TRAINING_SUCCESS] == 0 for line in metrics),
        "rows_sampled": sum(line["rows/sampled"] for line in metrics),
        "rows_trained": sum(line[f"{LEARNER}num_module_steps_trained"] for line in metrics),
    }


def differences(rows: list[dict], environment: str, coefficient: float, measure: str, alpha: float = 1.0) -> np.ndarray:
    """Return the differences to GRPO in points, one per seed that has both runs."""
    # Without hindsight the clamp has no effect, so GRPO's runs are the reference of every α.
    values = {
        (row["coefficient"], row["alpha"] if row["coefficient"] else None, row["seed"]): 100 * row[measure]
        for row in rows
        if row["environment"] == environment
    }
    seeds = sorted(seed for dose, clamp, seed in values if (dose, clamp) == (coefficient, alpha))
    return np.array(
        [values[coefficient, alpha, seed] - values[0.0, None, seed] for seed in seeds if (0.0, None, seed) in values]
    )


def table(rows: list[dict]) -> Iterator[str]:
    """Yield one line per environment, dose and α, with Holm's adjustment over all doses of a measure at α = 1."""
    adjusted = {}
    for measure in MEASURES:
        family = {
            place: interval.p_value
            for place in product(ENVIRONMENTS.values(), DOSES)
            if (interval := seed_interval(differences(rows, *place, measure))) is not None
        }
        adjusted |= {(*place, measure): p for place, p in zip(family, holm(list(family.values())), strict=True)}
    for environment in ENVIRONMENTS.values():
        own = [row for row in rows if row["environment"] == environment]
        for coefficient, alpha in sorted(
            {(row["coefficient"], row["alpha"]) for row in own}, key=lambda key: (-key[1], key[0])
        ):
            runs = [row for row in own if (row["coefficient"], row["alpha"]) == (coefficient, alpha)]
            cells = [environment, f"{coefficient:g}", f"{alpha:g}", str(len(runs))]
            for measure in MEASURES:
                cells.append(f"{100 * fmean(row[measure] for row in runs):.1f}")
                interval = (
                    seed_interval(differences(rows, environment, coefficient, measure, alpha)) if coefficient else None
                )
                if interval is None:
                    cells += ["", ""]
                    continue
                mean = differences(rows, environment, coefficient, measure, alpha).mean()
                cells.append(f"{mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]")
                cells.append(f"{adjusted[environment, coefficient, measure]:.2g}" if alpha == 1 else "–")
            kept, ratio = entropy_kept(runs), first_ratio(runs)
            cells += [f"{kept:.2f}", "–" if ratio is None else f"{ratio:.2f}"]
            yield f"| {' | '.join(cells)} |".replace("-", "−")


def entropy_kept(runs: list[dict]) -> float:
    """Return the policy's entropy after :data:`AFTER` iterations with λ over that before the first, as a mean over runs.

    An iteration logs the entropy of its samples, which come from the policy before the iteration's update.
    """
    return fmean(run["entropy"][run["start"] - 1 + AFTER] / run["entropy"][run["start"] - 1] for run in runs)


def first_ratio(runs: list[dict]) -> float | None:
    """Return the mean gradient ratio of the first iteration with λ, or ``None`` without λ."""
    ratios = [run["gradient_ratio"][0] for run in runs if run["gradient_ratio"]]
    return fmean(ratios) if ratios else None


def predictions(rows: list[dict]) -> Iterator[str]:
    """Yield how often each early measure predicts the sign of TRIAL − GRPO, with cross-validation over environments.

    For each left-out environment, the threshold is the one with the fewest errors on the doses of the other environments.
    """
    points = []
    for environment, coefficient in product(ENVIRONMENTS.values(), DOSES):
        gained = differences(rows, environment, coefficient, "area")
        runs = [
            row
            for row in rows
            if (row["environment"], row["coefficient"], row["alpha"]) == (environment, coefficient, 1.0)
        ]
        if len(gained) and runs:
            points.append(
                (environment, coefficient, entropy_kept(runs), -(first_ratio(runs) or 0.0), gained.mean() > 0)
            )
    for title, column in (("entropy after three iterations", 2), ("gradient ratio in the first", 3)):
        hits = []
        for left_out in dict.fromkeys(point[0] for point in points):
            others = [point for point in points if point[0] != left_out]
            limits = [-np.inf, *sorted(point[column] for point in others)]
            best = min(limits, key=lambda limit: sum((point[column] > limit) != point[4] for point in others))
            hits += [(point[column] > best) == point[4] for point in points if point[0] == left_out]
        yield f"{title}: sign predicted in {sum(hits)} of {len(hits)} environments and doses"


def draw(rows: list[dict]) -> list[Path]:
    """Draw the differences to GRPO by λ, one panel per environment that has runs of two seeds."""
    from trial_ray.reports.plots import drawing

    file = FILE.with_suffix(".png")
    compared = [name for name in ENVIRONMENTS.values() if len(differences(rows, name, DOSES[-1], MEASURES[0])) > 1]
    if not compared:
        return []
    with drawing([file], (3.0 * len(compared), 3.2), len(compared)) as (figure, _):
        for axis, environment in zip(figure.axes, compared, strict=True):
            for measure, label, colour in zip(MEASURES, ("area", "final success"), ("C0", "C1"), strict=True):
                found = [(dose, differences(rows, environment, dose, measure)) for dose in DOSES]
                found = [
                    (dose, values, interval)
                    for dose, values in found
                    if (interval := seed_interval(values)) is not None
                ]
                doses = [dose for dose, *_ in found]
                means = np.array([values.mean() for _, values, _ in found])
                errors = [
                    means - [interval.low for *_, interval in found],
                    np.array([interval.high for *_, interval in found]) - means,
                ]
                axis.errorbar(doses, means, errors, marker="o", capsize=3, label=label, color=colour)
            axis.axhline(0, color="0.5", linewidth=0.8)
            axis.set_xscale("log")
            axis.set_xticks(DOSES, [f"{dose:g}" for dose in DOSES])
            axis.set_xlabel("λ")
            axis.set_title(environment)
        figure.axes[0].set_ylabel("TRIAL − GRPO, points")
        figure.axes[0].legend()
    return [file]


if __name__ == "__main__":
    known = read_json(FILE, SCHEMA, VERSION)["runs"] if FILE.is_file() else []
    if sys.argv[1:]:
        trials = [path.parent for folder in sys.argv[1:] for path in Path(folder).glob("*/metrics.jsonl")]
        by_run = {tuple(row[name] for name in RUN): row for row in [*known, *filter(None, map(row_of, trials))]}
        known = [by_run[key] for key in sorted(by_run)]
        print(write_json(FILE, {"schema": SCHEMA, "schema_version": VERSION, "runs": known}))
    print("\n".join([*table(known), *predictions(known)]))
    equal = all(row["rows_sampled"] == row["rows_trained"] for row in known)
    print(f"{len(known)} runs; {sum(row['rows_sampled'] for row in known):,.0f} rows sampled, all trained: {equal}")
    print(*draw(known))

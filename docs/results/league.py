"""Compares the methods of `trial-ray sweep league`, all with untuned settings, with GRPO of the same seeds.

python docs/results/league.py DIR   # replaces the runs of an environment in league.json by those of a finished sweep
python docs/results/league.py       # prints the table, and draws league.png

In an interrupted league, not all methods have run with the last seed; `--seeds N` leaves out runs whose seed is N or higher.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
from effects import runs_of
from from_zero import REFERENCE, differences
from scipy import stats

from trial_ray.algorithms.methods import method_title
from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.files import read_json, write_json
from trial_ray.sweeps.study import RECIPES, STUDIES

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/league_runs", 1
ENVIRONMENTS = {"alfworld": "ALFWorld", "webshop": "WebShop"}
METHODS = STUDIES["league"].methods
TITLES = {name: RECIPES[name][0] if name in RECIPES else method_title(name) for name in METHODS}
RIVALS = tuple(name for name in METHODS if name != REFERENCE)
MEASURES = ("success", "area")
"""Final success is the primary measure, the area under the learning curve the secondary one."""
SHOWN = 14.0
"""Largest absolute difference, in points, that the figure draws; a larger one is written as text at the edge."""


def in_environment(rows: list[dict], environment: str) -> list[dict]:
    """Return the rows of the runs in an environment."""
    return [row for row in rows if row["environment"] == environment]


def table(rows: list[dict]) -> Iterator[str]:
    """Yield one line per method: in each environment the final success, its difference to GRPO's, and that of the area.

    Holm's adjustment is over the methods of an environment and a measure.
    """
    cells = {name: [TITLES[name]] for name in (REFERENCE, *RIVALS)}
    for environment in ENVIRONMENTS:
        own = in_environment(rows, environment)
        for name, line in cells.items():
            line.append(f"{100 * fmean(row[MEASURES[0]] for row in own if row['method'] == name):.1f}")
        for measure in MEASURES:
            intervals = [seed_interval(differences(own, name, measure)) for name in RIVALS]
            adjusted = holm([interval.p_value for interval in intervals])
            cells[REFERENCE] += ["", ""]
            for name, interval, p_value in zip(RIVALS, intervals, adjusted, strict=True):
                mean = differences(own, name, measure).mean()
                cells[name] += [f"{mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]", f"{p_value:.2g}"]
    for line in cells.values():
        yield f"| {' | '.join(line)} |".replace("-", "−")


def detectable(rows: list[dict]) -> float:
    """Return the difference of final success in points that the design finds with a probability of 80 %.

    The rows are those of one environment. The test is a paired t-test with a level of 5 %, before Holm's adjustment. The standard
    deviation of the differences is the root of its mean square over the methods. The result is NaN if no method has two seeds.
    """
    values = [differences(rows, name, MEASURES[0]) for name in RIVALS]
    values = [each for each in values if len(each) > 1]
    if not values:
        return float("nan")
    seeds = min(map(len, values))
    deviation = np.sqrt(np.mean([each.var(ddof=1) for each in values]))
    factor = stats.t.ppf(0.975, seeds - 1) + stats.t.ppf(0.8, seeds - 1)
    return float(factor * deviation / np.sqrt(seeds))


def draw(rows: list[dict]) -> Path:
    """Draw the differences of final success to GRPO with their intervals, one panel per environment."""
    from trial_ray.reports.plots import drawing

    file = FILE.with_suffix(".png")
    played = [name for name in ENVIRONMENTS if any(row["environment"] == name for row in rows)]
    with drawing([file], (4.0 * len(played), 4.2), len(played)) as (figure, _):
        for axis, environment in zip(figure.axes, played, strict=True):
            for place, name in enumerate(reversed(RIVALS)):
                values = differences(in_environment(rows, environment), name, MEASURES[0])
                if (interval := seed_interval(values)) is None:
                    continue
                if abs(mean := values.mean()) > SHOWN:
                    edge, align = (-SHOWN, "left") if mean < 0 else (SHOWN, "right")
                    text = f"{mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]".replace("-", "−")
                    axis.annotate(text, (edge, place), ha=align, va="center", color="C0")
                else:
                    errors = [[mean - interval.low], [interval.high - mean]]
                    axis.errorbar(mean, place, xerr=errors, marker="o", capsize=3, color="C0")
            axis.set_xlim(-SHOWN - 0.5, SHOWN + 0.5)
            axis.axvline(0, color="0.5", linewidth=0.8)
            axis.set_yticks(range(len(RIVALS)), [TITLES[name] for name in reversed(RIVALS)])
            axis.set_xlabel("final success − GRPO, points")
            axis.set_title(ENVIRONMENTS[environment])
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="folder of a league in one environment")
    parser.add_argument("--seeds", type=int, default=math.inf, metavar="N", help="leave out seeds from N on")
    args = parser.parse_args()
    known = read_json(FILE, SCHEMA, VERSION)["runs"] if FILE.exists() else []
    if args.folder:
        runs = runs_of(args.folder, None, args.seeds)
        if not runs:
            parser.error(f"{args.folder} has no run of a seed below {args.seeds}")
        played = {row["environment"] for row in runs}
        known = runs + [row for row in known if row["environment"] not in played]
        print(write_json(FILE, {"schema": SCHEMA, "schema_version": VERSION, "runs": known}))
    print("\n".join(table(known)))
    for environment in dict.fromkeys(row["environment"] for row in known):
        points = detectable(in_environment(known, environment))
        print(
            f"{ENVIRONMENTS[environment]}: the t-test finds a difference of {points:.1f} points with a probability of 80 %"
        )
    counts = {
        name: [sum(row[f"rows_{count}"] for row in known if row["method"] == name) for count in ("sampled", "trained")]
        for name in METHODS
    }
    print(f"{len(known)} runs; {sum(sampled for sampled, _ in counts.values()):,.0f} rows sampled, all trained but:")
    for name, (sampled, trained) in counts.items():
        if sampled != trained:
            print(f"  {TITLES[name]}: {trained:,.0f} of {sampled:,.0f} trained")
    print(draw(known))

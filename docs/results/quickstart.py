"""The table of docs/quickstart.md: evaluations before and after runs of the quickstart, one run per seed.

python docs/results/quickstart.py RUN...     # writes quickstart.json from run folders of `make train ARGS="--seed S"`
python docs/results/quickstart.py            # prints the table
"""

from __future__ import annotations

import sys
from pathlib import Path

from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import mcnemar_exact, paired_difference_interval, wilson_interval
from trial_ray.files import read_json, write_json
from trial_ray.metrics import LEARNER
from trial_ray.runs.metrics_file import read_metrics

FILE = Path(__file__).with_suffix(".json")
SCHEMA, VERSION = "trial_ray/quickstart_runs", 1


def row_of(run: Path) -> dict:
    """Return the counts of one run: the paired comparison of its two evaluations, and the turn rows sampled and trained."""
    before, after = (EvaluationResult.load(next((run / "evaluations").glob(name))) for name in ("before*", "after*"))
    pair = paired_comparison(before, after).to_dict()
    metrics, _ = read_metrics(run / "metrics.jsonl")
    counts = {name: pair[name] for name in ("pairs", "gained", "lost")}
    counts["won_before"] = round(pair["before"] * pair["pairs"])
    rows = {"rows_sampled": "rows/sampled", "rows_trained": f"{LEARNER}num_module_steps_trained"}
    record = read_json(run / "run.json")
    return {
        "seed": after.labels["seed"],
        "started": record["started"],
        "platform": record["platform"],
        **counts,
        **{name: sum(line[key] for line in metrics) for name, key in rows.items()},
    }


def table_row(row: dict) -> str:
    """Return a run's row in the table of docs/quickstart.md."""
    pairs, gained, lost, won = (row[name] for name in ("pairs", "gained", "lost", "won_before"))
    rates = []
    for count in (won, won + gained - lost):
        low, high = wilson_interval(count, pairs)
        rates.append(f"{count / pairs:.1%} [{low * 100:.1f}, {high * 100:.1f}]".replace("%", " %"))
    low, high = (100 * bound for bound in paired_difference_interval(gained, lost, pairs))
    difference = f"{100 * (gained - lost) / pairs:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"| {row['seed']} | {' | '.join(rates)} | {difference} | {gained} / {lost} | {mcnemar_exact(gained, lost):.1g} |"


if __name__ == "__main__":
    if sys.argv[1:]:
        runs = sorted((row_of(Path(run)) for run in sys.argv[1:]), key=lambda row: row["seed"])
        print(write_json(FILE, {"schema": SCHEMA, "schema_version": VERSION, "runs": runs}))
    print("\n".join(table_row(row) for row in read_json(FILE, SCHEMA, VERSION)["runs"]))

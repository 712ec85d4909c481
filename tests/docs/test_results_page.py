"""docs/results.md says what the committed JSON holds, and that JSON is what docs/results/effects.py makes of the runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from trial_ray.algorithms.methods import method_title

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(DOCS / "results" / "effects.py"))
effects, mixed_interval = SCRIPT["effects"], SCRIPT["mixed_interval"]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


STUDY, LEARNED, EFFECTS = read("study"), read("study_learning_alfworld"), read("effects")["effects"]
PLACES = {("alfworld", None): "ALFWorld", ("webshop", None): "WebShop", ("guessing", None): "guessing"}


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def points(found: dict[str, Any]) -> str:
    mean, low, high = (f"{100 * found[name]:+.1f}".replace("-", "−") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def test_the_effects_are_those_of_the_files_of_runs():
    files = sorted((DOCS / "results").glob("*_runs.json"))
    runs = [run for file in files for run in read(file.stem)["runs"]]
    assert [pytest.approx(each) for each in effects(runs)] == EFFECTS


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reference", ["grpo", "permuted", "uniform"])
def test_the_first_table_says_what_the_effects_are(place, reference):
    found = {
        each["measure"]: each
        for each in EFFECTS
        if (each["environment"], each.get("base_model")) == place
        and (each["method"], each["reference"]) == ("trial", reference)
        and (place[0] != "alfworld" or each["warm_start"] is None)  # over all of them
    }
    start = f"| TRIAL − {method_title(reference)} | {PLACES[place]} |"
    (row,) = (line for line in PAGE.splitlines() if line.startswith(start))
    for measure in ("area", "success"):
        assert f"{points(found[measure])} | {found[measure]['p_value']:.2g}" in row


@pytest.mark.parametrize("row", STUDY["rows"], ids=[row["method"] for row in STUDY["rows"]])
def test_every_cell_of_the_study_is_quoted_as_it_is(row):
    learned = LEARNED["methods"][row["method"]]
    cells = [f"{percent(each['mean'])} [{', '.join(map(percent, each['interval_95']))}]" for each in row["cells"]]
    cells += [percent(learned["area"]), f"{learned['median_iterations']:g}"]
    assert f"| {method_title(row['method'])} | {' | '.join(cells)} |" in PAGE


DIFFERING = np.array([[1.0, 2.5, 0.5, 3.0], [2.0, 4.5, 3.5, 5.0], [-1.0, 0.5, 1.5, 0.0]])


def test_the_mixed_model_is_the_one_that_statsmodels_fits():
    """``smf.mixedlm("d ~ 1", groups=start).fit(reml=True)`` of statsmodels 0.15.0: mean, standard error, deviations."""
    found = mixed_interval(DIFFERING)
    half = stats.t.ppf(0.975, 2) * 1.0137914
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(
        (1.9166667, 1.9166667 - half, 1.9166667 + half), abs=1e-4
    )
    assert (found["between_std"], found["within_std"]) == pytest.approx((1.6520145, 1.1902387), abs=1e-4)


def test_warm_starts_that_differ_by_no_more_than_their_seeds_are_one_sample():
    found, test = mixed_interval(DIFFERING.T), stats.ttest_1samp(DIFFERING.ravel(), 0)
    interval = test.confidence_interval(0.95)
    assert (found["low"], found["high"], found["p_value"]) == pytest.approx((interval.low, interval.high, test.pvalue))
    assert found["between_std"] == 0

"""Tables on pages are what the scripts beside the committed results make of them, with the statistics that they name."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "results" / "effects.py"))
effects, mixed_interval = SCRIPT["effects"], SCRIPT["mixed_interval"]


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def test_the_effects_are_those_of_the_files_of_runs():
    files = sorted((DOCS / "results").glob("*_runs.json"))
    runs = [run for file in files for run in read(file.stem)["runs"]]
    assert [pytest.approx(each) for each in effects(runs)] == read("effects")["effects"]


def test_the_quickstarts_table_is_made_of_its_runs():
    table_row = runpy.run_path(str(DOCS / "results" / "quickstart.py"))["table_row"]
    runs = read("quickstart")["runs"]
    assert [run["rows_sampled"] for run in runs] == [run["rows_trained"] for run in runs]
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert "\n".join(map(table_row, runs)) in page


def test_the_table_of_task_sampling_is_made_of_its_runs():
    runs = read("task_sampling")["runs"]
    assert len(runs) == 16
    assert all(run["rows_sampled"] == run["rows_trained"] for run in runs)
    lines = runpy.run_path(str(DOCS / "results" / "task_sampling.py"))["table"](runs)
    assert "\n".join(lines) in (DOCS / "results.md").read_text(encoding="utf-8")


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

"""Tables on pages agree with the committed results and the scripts beside them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SCRIPT = runpy.run_path(str(RESULTS / "effects.py"))
effects, mixed_interval = SCRIPT["effects"], SCRIPT["mixed_interval"]


def runs(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]


def test_effects_are_those_of_the_runs():
    rows = [run for file in sorted(RESULTS.glob("*_runs.json")) for run in runs(file.stem)]
    recorded = json.loads((RESULTS / "effects.json").read_text(encoding="utf-8"))["effects"]
    assert [pytest.approx(effect) for effect in effects(rows)] == recorded


@pytest.mark.parametrize(
    ("name", "page", "table"), [("quickstart", "quickstart", "table_row"), ("task_sampling", "results", "table")]
)
def test_page_has_the_table_of_the_runs(name, page, table):
    function = runpy.run_path(str(RESULTS / f"{name}.py"))[table]
    assert all(run["rows_sampled"] == run["rows_trained"] for run in runs(name))
    lines = function(runs(name)) if table == "table" else map(function, runs(name))
    assert "\n".join(lines) in (RESULTS.parent / f"{page}.md").read_text(encoding="utf-8")


def test_mixed_model_is_the_one_of_statsmodels():
    """``smf.mixedlm("d ~ 1", groups=start).fit(reml=True)`` of statsmodels 0.15.0: mean, standard error, deviations."""
    fit = mixed_interval(np.array([[1.0, 2.5, 0.5, 3.0], [2.0, 4.5, 3.5, 5.0], [-1.0, 0.5, 1.5, 0.0]]))
    half = stats.t.ppf(0.975, 2) * 1.0137914
    expected = {"mean": 1.9166667, "low": 1.9166667 - half, "high": 1.9166667 + half}
    expected |= {"between_std": 1.6520145, "within_std": 1.1902387}
    assert {name: fit[name] for name in expected} == pytest.approx(expected, abs=1e-4)

"""Tables on pages agree with the committed results and the scripts beside them."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

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
    ("name", "page", "table"),
    [
        ("quickstart", "quickstart", "table_row"),
        ("task_sampling", "results", "table"),
        ("dose", "results", "table"),
        ("from_zero", "results", "table"),
        ("league", "results", "table"),
    ],
)
def test_page_has_the_table_of_the_runs(name, page, table, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    function = runpy.run_path(str(RESULTS / f"{name}.py"))[table]
    partly_trained = {run["method"] for run in runs(name) if run["rows_sampled"] != run["rows_trained"]}
    assert partly_trained == ({"dapo"} if name == "league" else set())  # DAPO drops groups with equal returns.
    lines = function(runs(name)) if table == "table" else map(function, runs(name))
    assert "\n".join(lines) in (RESULTS.parent / f"{page}.md").read_text(encoding="utf-8")

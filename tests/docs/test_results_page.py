"""Tables on pages agree with the committed results and the scripts beside them."""

import json
import runpy

import pytest
from snippets import DOCS

RESULTS = DOCS / "results"


def recorded(name, key="runs"):
    return json.loads((RESULTS / f"{name}.json").read_text())[key]


def test_effects_are_those_of_the_runs():
    effects = runpy.run_path(f"{RESULTS}/effects.py")["effects"]
    rows = [run for file in sorted(RESULTS.glob("*_runs.json")) for run in recorded(file.stem)]
    assert [*map(pytest.approx, effects(rows))] == recorded("effects", "effects")


@pytest.mark.parametrize("name", ["quickstart", "task_sampling", "dose", "from_zero", "league"])
def test_page_has_the_table_of_the_runs(name, monkeypatch):
    monkeypatch.syspath_prepend(RESULTS)
    script, runs = runpy.run_path(f"{RESULTS}/{name}.py"), recorded(name)
    partly_trained = {run["method"] for run in runs if run["rows_sampled"] != run["rows_trained"]}
    assert partly_trained == ({"dapo"} if name == "league" else set())  # DAPO drops groups with equal returns.
    page, lines = (
        ("quickstart", map(script["table_row"], runs)) if name == "quickstart" else ("results", script["table"](runs))
    )
    assert "\n".join(lines) in (DOCS / f"{page}.md").read_text()

"""docs/results.md says what the committed JSON holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trial_ray.algorithms.methods import method_title

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
TABLE = json.loads((DOCS / "results" / "table3.json").read_text(encoding="utf-8"))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


@pytest.mark.parametrize("row", TABLE["rows"], ids=lambda row: row["method"])
def test_every_cell_is_quoted_as_it_is(row):
    cells = [f"{percent(cell['mean'])} [{', '.join(map(percent, cell['interval_95']))}]" for cell in row["cells"]]
    seeds = ", ".join(map(percent, row["cells"][-1]["by_seed"].values()))
    assert f"| {method_title(row['method'])} | {' | '.join([*cells, seeds])} |" in PAGE


@pytest.mark.parametrize("found", TABLE["comparisons"], ids=lambda found: f"{found['method']}-{found['reference']}")
def test_every_difference_is_quoted_as_it_is(found):
    interval = f"[{signed(found['low'])}, {signed(found['high'])}]"
    methods = f"{method_title(found['method'])} − {method_title(found['reference'])}"
    assert f"| {methods} | {signed(found['mean'])} | {interval} | {found['p_value']:.2g} |" in PAGE


def test_the_evidence_is_as_large_as_the_page_says():
    assert all(len(row["cells"][-1]["by_seed"]) == 5 for row in TABLE["rows"])
    (protocol,) = TABLE["protocols"].values()
    assert protocol["num_tasks"] == 256
    assert len(TABLE["runs"]) == 20

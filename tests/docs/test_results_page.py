"""docs/results.md says what the committed JSON holds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trial_ray.algorithms.methods import method_title
from trial_ray.evaluation.table_text import difference_cells
from trial_ray.reproduction.effects import effects
from trial_ray.warmstart.judgement import auc

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


STUDY, SHOP = read("study"), read("webshop_table3")
LEARNED = read("study_learning_alfworld")
ROWS = [(name, row) for name, table in (("study", STUDY), ("webshop", SHOP)) for row in table["rows"]]
DIFFERENCES = [
    (name, found)
    for name, differences in (
        ("study", STUDY["comparisons"]),
        ("area", LEARNED["differences"]),
        ("webshop", SHOP["comparisons"]),
    )
    for found in differences
]
FEW_SEEDS = 3
"""Of the methods that are there for orientation; their differences stand in the JSON alone."""
QUOTED = [(name, found) for name, found in DIFFERENCES if found["seeds"] > FEW_SEEDS]


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def pair(found: dict[str, Any]) -> str:
    return f"{method_title(found['method'])} − {method_title(found['reference'])}"


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{name}-{row['method']}" for name, row in ROWS])
def test_every_cell_is_quoted_as_it_is(row):
    cells = [f"{percent(cell['mean'])} [{', '.join(map(percent, cell['interval_95']))}]" for cell in row["cells"]]
    seeds = ", ".join(map(percent, row["cells"][-1]["by_seed"].values()))
    assert f"| {method_title(row['method'])} | {' | '.join([*cells, seeds])} |" in PAGE


@pytest.mark.parametrize("found", [each for _, each in QUOTED], ids=[f"{name}-{pair(each)}" for name, each in QUOTED])
def test_every_quoted_difference_is_as_the_tables_write_it(found):
    assert f"| {' | '.join(difference_cells(found, method_title))} |" in PAGE


def test_the_runs_of_the_study_are_those_of_its_table_and_curves():
    runs = {(run["method"], str(run["seed"])): run for run in read("study_runs")["runs"]}
    assert {key: run["area"] for key, run in runs.items()} == {
        (method, seed): area for method, of in LEARNED["methods"].items() for seed, area in of["area_by_seed"].items()
    }
    assert {key: run["success"] for key, run in runs.items()} == {
        (row["method"], seed): success for row in STUDY["rows"] for seed, success in row["cells"][-1]["by_seed"].items()
    }


def test_the_effects_are_those_of_the_files_of_runs_and_quoted_as_they_are():
    runs = [run for name in ("guessing_runs", "study_runs") for run in read(name)["runs"]]
    found = read("effects")["effects"]
    assert found == [pytest.approx(each) for each in effects(runs)]
    (area, success) = (
        each
        for each in found
        if (each["environment"], each["method"], each["reference"]) == ("guessing", "trial", "grpo")
    )
    for effect in (area, success):
        interval = ", ".join(f"{100 * effect[bound]:.1f}" for bound in ("low", "high"))
        assert f"{100 * effect['mean']:.1f} points" + (" of area" if effect is area else "") in PAGE.replace("−", "-")
        assert f"[{interval}]" in PAGE.replace("−", "-")
    assert f"p = {area['p_value']:.2g}" in PAGE
    (of_table,) = (
        each["over_seeds"]
        for each in read("guessing")["comparisons"]
        if (each["method"], each["reference"], each["column"]) == ("trial", "grpo", "Succ.")
    )
    assert f"p = {of_table['p_value']:.2g}, {of_table['p_holm']:.2g} after adjustment" in PAGE
    sampled, trained = (
        sum(run[rows] for run in read("guessing_runs")["runs"]) for rows in ("rows_sampled", "rows_trained")
    )
    assert sampled == trained
    assert f"{sampled:,}" in PAGE


def test_what_is_made_of_the_study_of_warm_starts_is_what_the_page_says():
    made = read("shape_runs.partial")["runs"]
    assert f"{len(made)} of 128 runs made" in PAGE
    assert all(run["rows_sampled"] == run["rows_trained"] > 0 for run in made)


def test_what_a_pretrained_model_judges_by_is_what_its_turns_say():
    found = read("pretrained_judgement")
    turns = found["of_turns"]
    assert f"{found['turns']} turns, of which {found['wasted']['turns']} are wasted" in PAGE
    for name, quoted in (
        ("auc_wasted", "an AUC of {:.2f} [{:.2f}, {:.2f}]"),
        ("auc_routine", "{:.2f} [{:.2f}, {:.2f}]"),
    ):
        assert quoted.format(*found[name]) in PAGE
    for kind in ("go", "take", "move"):
        of_kind = [turn for turn in turns if turn["action"].split()[0] == kind]
        wasted = np.array([not turn["planned"] for turn in of_kind])
        area = auc(-np.array([turn["gap"] for turn in of_kind]), wasted)
        assert f"`{kind}` {area:.2f} ({wasted.sum()} of {len(of_kind)}" in " ".join(PAGE.split())
    lost = [statistics.fmean(turn["gap"] for turn in turns if turn["action"] == each) for each in ("look", "inventory")]
    assert f"lose {-lost[0]:.2f} and {-lost[1]:.2f} nats" in PAGE
    assert not any(turn["planned"] for turn in turns if turn["action"] in ("look", "inventory"))


def test_no_difference_of_methods_with_few_seeds_is_significant_by_both_tests():
    others = [found for _, found in DIFFERENCES if found["seeds"] == FEW_SEEDS]
    assert len(QUOTED) + len(others) == len(DIFFERENCES)
    assert [len(differences) for differences in (STUDY["comparisons"], LEARNED["differences"])] == [17, 17]
    assert len(others) == 2 * 10
    assert min(max(found["p_holm"], found["over_seeds"]["p_holm"]) for found in others) > 0.05


@pytest.mark.parametrize("method", LEARNED["methods"])
def test_every_area_is_quoted_as_it_is(method):
    of = LEARNED["methods"][method]
    median = "–" if of["median_iterations"] is None else f"{of['median_iterations']:g}"
    reached = f"{of['seeds_that_reach']} of {len(of['area_by_seed'])}"
    assert f"| {method_title(method)} | {percent(of['area'])} | {median} | {reached} |" in PAGE


@pytest.mark.parametrize(("table", "seeds"), [(SHOP, [5] * 4), (STUDY, [3] * 5 + [8] * 5)], ids=["webshop", "study"])
def test_the_evidence_is_as_large_as_the_page_says(table, seeds):
    assert sorted(len(row["cells"][-1]["by_seed"]) for row in table["rows"]) == seeds
    assert {protocol["num_tasks"] for protocol in table["protocols"].values()} == {256}
    assert len(table["runs"]) == sum(seeds)

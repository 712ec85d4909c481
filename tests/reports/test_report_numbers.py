"""Which tasks, runs and iterations a number of the report is of: it says so, and mixed ones are refused."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

from synthetic_run import finished_run, recorded_run

from trial_ray.adapters import alfworld
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.metrics import EVALUATION_SUCCESS, TRAINING_SUCCESS, TURN_SCORE
from trial_ray.reports import plots
from trial_ray.reports.charts import curve_chart
from trial_ray.reports.groups import group_runs
from trial_ray.reports.page import load_groups, report_page
from trial_ray.reports.tables import difference_rows, family_rows, success_rows
from trial_ray.runs.reader import RecordedRun
from trial_ray.trajectory import EpisodeResult

LAST = 12
"""Iterations of the runs."""


def evaluation(won: int, tasks: int, failed: int = 0, first: int = 0) -> EvaluationResult:
    """The first ``won`` of the tasks are solved, the last ``failed`` ended by an error."""
    ended = ["terminated"] * (tasks - failed) + ["failed"] * failed
    episodes = [
        EpisodeResult(f"game-{first + at}", "look", at < won, float(at < won), 9, end) for at, end in enumerate(ended)
    ]
    return EvaluationResult({"env": "trial/ALFWorld-v0", "split": "generated", "num_tasks": tasks}, episodes)


def run(seed=0, method="GRPO", last=LAST, rate=0.3, alpha=1.0, **played: EvaluationResult) -> RecordedRun:
    """A run with evaluations after the iterations that they are named by, as in ``after_4``."""
    return recorded_run(
        Path(f"{method}-{alpha}-{seed}"),
        method=method,
        seed=seed,
        settings={"clamp_alpha": alpha},
        environments={"ALFWorld-v0": alfworld.ADAPTER},
        metrics=[{"iteration": n} | ({} if rate is None else {TRAINING_SUCCESS: rate}) for n in range(1, last + 1)],
        evaluations={"": {int(name.rpartition("_")[2]): result for name, result in played.items()}} if played else {},
    )


def success(*runs: RecordedRun) -> list[list[str]]:
    """Iterations, success after training and before, and change, a row a group."""
    return [row[2:] for row in success_rows(group_runs(runs))]


def page(*runs: RecordedRun) -> str:
    text = re.sub(r"<style\b.*?</style>", "", report_page(group_runs(runs), "title"), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def points(*runs: RecordedRun) -> dict:
    return curve_chart(EVALUATION_SUCCESS, group_runs(runs))["series"][0]


def test_an_evaluation_is_of_its_iteration_and_the_newest_is_the_result():
    early = run(after_0=evaluation(6, 48), after_4=evaluation(1, 48))
    early.metrics[7][EVALUATION_SUCCESS] = 0.5
    (drawn,) = points(early)["runs"]
    assert dict(zip(drawn["x"], drawn["y"], strict=True)) == {0: 6 / 48, 4: 1 / 48, 8: 0.5}
    ((trained, after, before, _),) = success(early)
    assert (trained, after, before) == ("4 of 12", "2.1% [0.4%, 10.9%] of 48", "12.5% [5.9%, 24.7%] of 48")
    assert "2.1% [0.4%, 10.9%] (1/48), iteration 4" in page(early)
    both = run(after_4=evaluation(1, 48), after_12=evaluation(12, 48))
    assert points(both)["runs"][0]["x"] == [4, 12]
    assert success(both) == [["12", "25.0% [14.9%, 38.8%] of 48", "–", "–"]]


def test_environments_with_a_number_at_the_end_are_not_iterations(tmp_path):
    folder = finished_run(tmp_path / "run", "grpo", training=False)
    shutil.rmtree(folder / "evaluations")
    names = ("before_Shop", "before_Shop_2", "before_Shop_000007", "after_Shop_000012", "after_Shop_2_000012", "unseen")
    for name in names:
        evaluation(1, 4).save(folder / "evaluations" / f"{name}.json")
    found = RecordedRun(folder)
    played = {name: list(results) for name, results in found.evaluations.items()}
    assert played == {"Shop": [12, 0], "Shop_000007": [0], "Shop_2": [12, 0]}
    assert "evaluations/unseen.json names no iteration" in " ".join(found.reasons())


def test_tasks_that_failed_are_not_counted():
    ((_, after, before, change),) = success(run(after_0=evaluation(6, 48), after_12=evaluation(0, 48, failed=40)))
    assert after == "0.0% [0.0%, 32.4%] of 8, 40 failed"
    assert before == "12.5% [5.9%, 24.7%] of 48"
    assert "(8 tasks, " in change
    none = run(after_12=evaluation(0, 48, failed=48))
    assert "No task was played to its end (48 of 48 failed)" in success(none)[0][1]
    assert "nan%" not in page(none)


def seeds(*results: EvaluationResult, **more: EvaluationResult) -> list[RecordedRun]:
    return [run(seed, after_12=result, **more) for seed, result in enumerate(results)]


def test_seeds_of_other_tasks_or_lengths_are_not_averaged():
    evaluation_sets = seeds(evaluation(24, 48), evaluation(0, 20))
    finished = seeds(evaluation(24, 48), evaluation(0, 48, failed=40))
    lengths = [run(0, after_12=evaluation(24, 48)), run(1, last=6, after_6=evaluation(3, 48))]
    for runs, words in (
        (evaluation_sets, "num_tasks is 48 in one and 20 in another"),
        (finished, "did not finish the same tasks (48 and 8)"),
        (lengths, "evaluated after 12 and 6 iterations, so they cannot be averaged"),
    ):
        ((trained, after, before, change),) = success(*runs)
        assert words in after
        assert (trained, before, change) == ("–", "–", "–")
    assert points(*evaluation_sets)["mean"] == []
    assert family_rows(group_runs(evaluation_sets)) == family_rows(group_runs(lengths)) == []
    others = [run(seed, "TRIAL", after_12=evaluation(20, 48)) for seed in (0, 1)]
    found, missing = difference_rows(group_runs([*lengths, *others]))
    assert (found, len(missing)) == ([], 1)


def test_differences_over_seeds_are_of_the_tasks_that_every_evaluation_finished():
    runs = seeds(*[evaluation(24, 48, failed=8)] * 2, after_0=evaluation(6, 48))
    assert "The evaluations did not finish the same tasks (48 and 40)" in success(*runs)[0][-1]


def test_numbers_are_of_the_runs_that_were_evaluated():
    runs = seeds(evaluation(24, 48), evaluation(12, 48))
    runs[0].evaluations[""][0] = evaluation(6, 48)
    ((_, after, before, change),) = success(*runs)
    assert after.startswith("37.5%")
    assert before.startswith("12.5%")
    assert before.endswith("(1 of 2 runs)")
    assert change.startswith("+37.5 [")
    runs.append(run(2, after_0=evaluation(6, 48)))
    assert success_rows(group_runs(runs))[0][0] == "GRPO (2 of 3 seeds)"


def test_figures_name_their_iterations_and_a_run_may_lack_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "FORMATS", ("svg",))
    folders = [finished_run(tmp_path / f"seed{seed}", "trial", seed, LAST - 6 * seed) for seed in (0, 1)]
    folders.append(finished_run(tmp_path / "uniform", "uniform", iterations=6))
    for folder in folders[1:]:
        shutil.rmtree(folder / "evaluations")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: value for key, value in line.items() if key != EVALUATION_SUCCESS} for line in lines]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, kept)))
    groups = load_groups(folders)
    names = {
        key: [each["name"] for each in curve_chart(key, groups)["series"]] for key in (EVALUATION_SUCCESS, TURN_SCORE)
    }
    assert names == {EVALUATION_SUCCESS: ["TRIAL (1 of 2 seeds)"], TURN_SCORE: ["TRIAL (2 seeds)", "Uniform (seed 0)"]}
    written = {path.name: path.read_text() for path in plots.write_figures(groups, tmp_path / "figures")}
    assert ": iterations 12 and 6" in written["figure3_1.svg"]

"""The report page: what it says, what it does with damaged folders and hostile texts, and how it draws in a browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import sys
from pathlib import Path

import chromium
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_samples import evaluation
from rewritten_parquet import rewrite
from scipy import stats
from synthetic_run import START, finished_run, recorded_run

from trial_ray import TRIALConfig, cli
from trial_ray.environments import alfworld
from trial_ray.environments.adapter import EnvironmentAdapter, ReportLabels
from trial_ray.evaluation.comparison import paired_comparison
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
from trial_ray.learner.recording import TRAINING_SCHEMA
from trial_ray.metrics import TRAINING_SUCCESS, TURN_SCORE
from trial_ray.reports.charts import class_chart, curve_chart, profile_chart
from trial_ray.reports.findings import compare, success_rows
from trial_ray.reports.groups import group_runs
from trial_ray.reports.report import load_groups, report_page
from trial_ray.reports.run import RecordedRun
from trial_ray.runs.checkpoints import find_checkpoint, list_checkpoints
from trial_ray.runs.folder import RunFolder

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods, two seeds each."""
    root = tmp_path_factory.mktemp("runs")
    return [finished_run(root / f"{method}-{seed}", method, seed) for method in ("grpo", "trial") for seed in (0, 1)]


@pytest.fixture
def run(runs, tmp_path):
    """A copy of one run, to damage."""
    return Path(shutil.copytree(runs[2], tmp_path / "damaged", ignore=shutil.ignore_patterns("report.html")))


def report(*arguments) -> int:
    return cli.main(["report", *map(str, arguments)])


def text_of(path: Path) -> str:
    """What a reader sees, without the scripts."""
    source = re.sub(r"<(script|style)\b.*?</\1>", "", path.read_text(), flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", source)).split())


def after(folder: Path) -> EvaluationResult:
    return EvaluationResult.load(next((folder / "evaluations").glob("after*")))


def test_runs_that_differ_by_seed_alone_are_one_curve_with_an_interval(runs):
    groups = load_groups(runs)
    assert [group.title for group in groups] == ["GRPO (2 seeds)", "TRIAL (2 seeds)"]
    chart = curve_chart(TRAINING_SUCCESS, groups)
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs[2:]]
    values = np.array([[line[TRAINING_SUCCESS] for line in run] for run in lines])
    series = chart["series"][1]
    assert series["mean"] == pytest.approx(values.mean(0), rel=1e-5)
    found = bootstrap_mean(values[:, 3:4], resamples=1000)
    assert (series["low"][3], series["high"][3]) == pytest.approx((found.low, found.high), rel=1e-5)
    assert [run["name"] for run in series["runs"]] == ["seed 0", "seed 1"]
    assert chart["warm_up"] == [START]


def test_the_turn_score_is_of_methods_with_a_hindsight_view_in_windows(runs):
    chart = curve_chart(TURN_SCORE, load_groups(runs))
    assert [series["group"] for series in chart["series"]] == [1]
    assert chart["series"][0]["x"] == [3, 8, 11.5]


def test_the_summary_gives_every_interval(runs, tmp_path):
    assert report(*runs, "--output", tmp_path / "page.html") == 0
    said = text_of(tmp_path / "page.html")
    results = [after(run) for run in runs]
    success = np.array([[float(episode.success) for episode in result.episodes] for result in results])
    low, high = wilson_interval(int(success[2:].sum()), 128)  # as in a table's cell
    assert (
        f"TRIAL (2 seeds) ALFWorld, split generated 12 {success[2:].mean():.1%} [{low:.1%}, {high:.1%}] of 64" in said
    )
    found = bootstrap_mean(success[2:] - success[:2])
    change, name = found.stricter
    points = f"{100 * found.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    assert f"TRIAL − GRPO ALFWorld, split generated {points} {change.p_value:.2g} 2 × 64 {name}" in said
    assert change.p_value == max(found.p_value, found.over_seeds.p_value)
    assert "cost.json" not in said


def seeds_of(outcomes):
    """Records of runs that differ by seed alone, from the outcomes of each one's tasks after an iteration."""
    common = {"method": "TRIAL", "settings": {"lr": 0.1}}
    return [
        recorded_run(Path(f"run-{seed}"), seed=seed, evaluations={"": {1: evaluation(won)}}, **common)
        for seed, won in enumerate(outcomes)
    ]


def test_success_that_no_seed_had_keeps_its_interval():
    (group,) = group_runs(seeds_of([[0] * 16] * 3))
    (row,) = success_rows([group])
    low, high = wilson_interval(0, 48)
    assert row[3] == f"0.0% [{low:.1%}, {high:.1%}] of 16"


def test_a_difference_of_few_seeds_is_no_surer_than_a_t_test_over_them():
    gains = (4, 30, 44)
    before = [evaluation([0] * 100) for _ in gains]
    after = [evaluation([1] * n + [0] * (100 - n)) for n in gains]
    found = compare(list(zip(before, after, strict=True)))
    assert found.test == "paired t-test over 3 seeds"
    assert found.p_value == pytest.approx(stats.ttest_1samp([n / 100 for n in gains], 0).pvalue)
    assert 0.1 < found.p_value < 0.2


def test_one_run_is_compared_with_its_own_beginning(runs, capsys):
    assert report(runs[2]) == 0
    before = EvaluationResult.load(runs[2] / "evaluations" / "before.json")
    pair = paired_comparison(before, after(runs[2]))
    low, high = pair.interval
    said = text_of(runs[2] / "report.html")
    assert f"{100 * pair.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}], p = {pair.p_value:.2g}" in said
    assert f"report.html ({(runs[2] / 'report.html').stat().st_size:,} bytes)" in capsys.readouterr().out


def test_a_tilde_is_the_home_folder_in_every_path_of_the_command_line(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert report("~/damaged") == 0
    assert report("~/damaged", "--output", "~/page.html", "--figures", "~/figures") == 0
    assert (tmp_path / "page.html").is_file()
    assert {"figure2.svg", "figure3.png", "panel.svg"} <= {path.name for path in (tmp_path / "figures").iterdir()}
    assert ": iteration 12" in (tmp_path / "figures" / "figure3.svg").read_text()
    assert not (tmp_path / "~").exists()
    assert (run / "report.html").is_file()


def test_multipliers_come_from_what_training_recorded(runs):
    groups = load_groups(runs)
    weights = {name: [] for name in class_chart(groups)["classes"]}
    for run in groups[1].runs:
        (file,) = run.path.glob("training/*/*.parquet")
        recorded = pq.read_table(file, columns=["turn_weight"], partitioning=None)["turn_weight"].to_pylist()
        assert [turn.weight for trace in run.allocation.traces for turn in trace.turns] == recorded
        for trace in run.allocation.traces:
            if trace.success:
                for name in weights:
                    own = [turn.weight for turn in trace.turns if turn.action_class == name]
                    weights[name] += [np.mean(own)] if own else []
    (series,) = class_chart(groups)["series"]
    assert series["means"].keys() == {name for name, values in weights.items() if values}
    for name, found in series["means"].items():
        values = weights[name]
        assert found["mean"] == pytest.approx(np.mean(values))
        assert found["sem"] == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5)
    shown = [turn["weight"] for turn in profile_chart(groups)["turns"]]
    assert shown in [[turn.weight for turn in trace.turns] for trace in groups[1].runs[0].allocation.traces]


@pytest.mark.parametrize("number", [1e308, 1e150])
def test_metrics_of_any_size_end_no_report(run, number):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    extreme = [{**dict.fromkeys(line, number), "iteration": line["iteration"]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in extreme))
    assert report(run) == 0


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1.7e308])
def test_a_weight_that_cannot_be_drawn_ends_no_report(run, weight):
    (file,) = run.glob("training/*/*.parquet")
    rows = pq.read_table(file, partitioning=None).to_pylist()
    rewrite(pa.Table.from_pylist([{**row, "turn_weight": weight} for row in rows], schema=TRAINING_SCHEMA), file)
    assert report(run) == 0
    if weight == 1.7e308:
        assert "“One trajectory's allocation”: Its numbers are too large" in text_of(run / "report.html")


def test_groups_are_looked_for_as_far_back_as_the_run_lets_them_wait(tmp_path):
    folder = finished_run(tmp_path / "run")
    record = json.loads((folder / "resolved_config.json").read_text())
    record["settings"]["max_staleness"] = 6
    (folder / "resolved_config.json").write_text(json.dumps(record))
    trajectories = folder / "trajectories"
    (trajectories / "iteration=00012").rename(trajectories / "iteration=00006")
    other = finished_run(tmp_path / "other", seed=1) / "trajectories" / "iteration=00012"
    for number in range(7, 13):
        shutil.copytree(other, trajectories / f"iteration={number:05d}")
    (folder / "training" / "iteration=00012.bak").mkdir()
    found = RecordedRun(folder)
    assert (found.allocation.iteration, found.reasons()) == (12, [])
    shutil.rmtree(trajectories / "iteration=00006")
    found = RecordedRun(folder)
    assert found.allocation is None
    assert "holds none of the groups" in found.reasons()[-1]


def test_settings_name_groups_of_one_method(tmp_path):
    folders = [
        finished_run(tmp_path / f"run{index}", clamp_alpha=alpha, iterations=2)
        for index, alpha in enumerate((0.5, 1.0))
    ]
    assert [group.name for group in load_groups(folders)] == ["TRIAL, clamp_alpha 0.5", "TRIAL, clamp_alpha 1.0"]


def test_an_environment_is_called_by_the_title_that_its_user_gave(tmp_path):
    adapter = EnvironmentAdapter(
        "trial/ALFWorld-v0",
        title="My <b>Kitchen</b>",
        templates=alfworld.ADAPTER.templates,
        labels=ReportLabels(
            family_titles={"pick_and_place_simple": "Put away"},
            split_titles={"generated": "My kitchen's games"},
            action_patterns=[("take", "acquisition")],
        ),
    )
    folder = finished_run(tmp_path / "run", adapter=adapter, iterations=2)
    assert report(folder) == 0
    said = text_of(folder / "report.html")
    assert "My <b>Kitchen</b>" in said
    assert "Put away" in said
    assert "My kitchen's games" in said
    assert "trial/ALFWorld-v0" not in said.partition("Every setting")[0]
    classes = {turn.action_class for trace in RecordedRun(folder).allocation.traces for turn in trace.turns}
    assert classes == {"acquisition", "completion", "inspection/other"}


def test_a_report_without_classes_of_actions_names_none(tmp_path):
    adapter = EnvironmentAdapter("trial/ALFWorld-v0", templates=alfworld.ADAPTER.templates)
    folder = finished_run(tmp_path / "run", adapter=adapter, iterations=2)
    assert report(folder, "--figures", tmp_path / "figures") == 0
    shown = text_of(folder / "report.html") + (tmp_path / "figures" / "figure3.svg").read_text()
    assert "One trajectory's allocation" in shown
    assert [name for name in ("acquisition", "inspection/other", "class of action") if name in shown] == []


def test_the_page_loads_nothing_and_admits_no_script_and_no_other_style(runs, tmp_path):
    assert report(runs[0], "--output", tmp_path / "page.html") == 0
    source = (tmp_path / "page.html").read_text()
    style = re.search(r"<style>(.*?)</style>", source, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]+)"', source)[1])
    assert (
        policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"""<script|\sstyle=|(?:src|href)=["'](?!#|data:)|\son\w+=""", source)


DAMAGES = {
    "half a line": ("metrics.jsonl", lambda text: text[: len(text) - 40], "1 line is of metrics.jsonl cut off"),
    "no cost": ("cost.json", None, "cost.json is missing"),
    "cost of another kind": ("cost.json", lambda text: '{"seconds": 3}', "cost.json is not what this version writes"),
    "no config": ("resolved_config.json", None, "resolved_config.json is missing"),
    "half a config": ("resolved_config.json", lambda text: text[:99], "resolved_config.json: JSONDecodeError"),
    "a list": ("run.json", lambda text: "[1]", "holds no JSON object"),
    "half an evaluation": ("evaluations/before.json", lambda text: text[:99], "before.json: JSONDecodeError"),
    "killed": ("run.json", lambda text: text.replace('"done"', '"running"'), "The run has not ended, or was killed"),
    "no metrics": ("metrics.jsonl", None, "metrics.jsonl: FileNotFoundError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_partial_run_says_what_is_missing(run, damage):
    name, change, expected = DAMAGES[damage]
    file = run / name
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text()))
    assert expected in " ".join(RecordedRun(run).reasons())


def test_what_is_missing_stands_on_the_page_and_in_the_terminal(run, capsys):
    (run / "cost.json").unlink()
    assert report(run) == 0
    assert "missing: damaged: cost.json is missing" in capsys.readouterr().out
    assert "What is missing cost.json is missing" in text_of(run / "report.html")


def test_turn_weights_that_cannot_be_read_are_missing_and_the_rest_is_there(run):
    (training,) = run.glob("training/*/*.parquet")
    table = pq.read_table(training, partitioning=None)
    training = rewrite(table.drop_columns(["turn_weight"]), training)
    assert "lacks columns of schema version 2: turn_weight" in " ".join(RecordedRun(run).reasons())
    training.write_bytes(b"PAR1 cut")
    assert "is no complete Parquet file" in " ".join(RecordedRun(run).reasons())
    rewrite(table, training)
    assert RecordedRun(run).reasons() == []
    (trajectories,) = run.glob("trajectories/*/*.parquet")
    older = pq.read_table(trajectories, partitioning=None).replace_schema_metadata({"trial_ray.schema_version": "3"})
    rewrite(older, trajectories)
    assert "schema version 3" in " ".join(RecordedRun(run).reasons())
    shutil.rmtree(run / "training")
    assert "RUN/training was not recorded" in " ".join(RecordedRun(run).reasons())
    assert report(run) == 0


def test_where_nothing_can_be_shown_the_exit_code_is_2(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert report(tmp_path / "empty") == 2
    assert "it is empty" in capsys.readouterr().err
    assert report(tmp_path / "absent") == 2
    assert "does not exist" in capsys.readouterr().err
    shutil.rmtree(run / "evaluations")
    (run / "metrics.jsonl").write_text('{"iteration": 1, "x')
    assert report(run) == 2
    assert "nothing to show" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def make_sweep(folder: Path, failed: bool) -> Path:
    trials = []
    for index, alpha in enumerate((0.5, 1.0)):
        name = f"abc_0000{index}"
        config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="m").training(clamp_alpha=alpha)
        trial = RunFolder.of_trial(folder / f"TRIAL_env_{name}_{index}", config.debugging(seed=index), ["sweep"])
        for iteration in () if failed else (1, 2):
            trial.log(iteration, {"env_runners/success_rate": 0.1 * iteration})
        status = "failed" if failed else "done"
        trial.set_state(status)
        trials.append({"name": name, "parameters": {"clamp_alpha": alpha, "seed": index}, "status": status})
    (folder / "sweep.json").write_text(json.dumps({"metric": "x", "mode": "max", "trials": trials}))
    return folder


def test_a_sweep_is_one_curve_a_trial(tmp_path, capsys):
    folder = make_sweep(tmp_path / "sweep", failed=False)
    groups = load_groups([folder])
    assert [(group.title, group.runs[0].iterations) for group in groups] == [
        ("TRIAL, clamp_alpha 0.5 (seed 0)", 2),
        ("TRIAL, clamp_alpha 1.0 (seed 1)", 2),
    ]
    assert report(folder) == 0
    assert RecordedRun(next(folder.glob("TRIAL_*"))).config.settings["clamp_alpha"] in (0.5, 1.0)


def test_iterations_that_a_trial_made_again_are_counted_once_and_a_change_of_its_settings_is_named(tmp_path):
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="m")
    trial = RunFolder.of_trial(tmp_path / "trial", config, ["sweep"])
    for iteration, rate in [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (2, 0.5), (3, 0.6)]:
        trial.log(iteration, {"env_runners/success_rate": rate})
    again = RunFolder.of_trial(tmp_path / "trial", config.copy(copy_frozen=False).training(lr=0.5), ["sweep"])
    again.log(4, {"env_runners/success_rate": 0.7})
    run = RecordedRun(tmp_path / "trial")
    found = [(line["iteration"], line["env_runners/success_rate"]) for line in run.metrics]
    assert found == [(1, 0.1), (2, 0.5), (3, 0.6), (4, 0.7)]
    assert [(each.iteration, each.name, each.after) for each in run.config.changes] == [(4, "lr", 0.5)]


def test_checkpoints_that_tune_keeps_are_found_and_those_that_it_removed_are_not(tmp_path):
    config = TRIALConfig().environment("trial/ALFWorld-v0").rl_module(model_path="m")
    trial = RunFolder.of_trial(tmp_path / "trial", config, ["sweep"])
    for iteration in (5, 10):
        saved = trial.path / f"checkpoint_{iteration // 5 - 1:06d}"
        saved.mkdir()
        (saved / "rllib_checkpoint.json").write_text("{}")
        trial.link_checkpoint(iteration, saved)
    assert find_checkpoint(trial.path).name == "000010"
    shutil.rmtree(trial.path / "checkpoint_000000")
    moved = trial.path.rename(tmp_path / "moved")
    assert [path.name for path in list_checkpoints(moved / "checkpoints")] == ["000010"]


def test_a_sweep_in_which_every_trial_failed_has_nothing_to_show(tmp_path, capsys):
    assert report(make_sweep(tmp_path / "sweep", failed=True)) == 2
    assert "The trial failed; error.txt" in capsys.readouterr().err


def test_without_matplotlib_the_page_has_its_tables_and_files_are_refused(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(runs[2], "--output", tmp_path / "page.html") == 0
    said = text_of(tmp_path / "page.html")
    assert "Charts need matplotlib" in said
    assert "Numbers of “Success in training”" in said
    assert report(runs[2], "--output", tmp_path / "page.html", "--figures", tmp_path / "figures") == 2
    assert "trial-ray[reports]" in capsys.readouterr().err


@pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium")
def test_the_page_draws_and_runs_nothing_of_a_hostile_run(runs, tmp_path):
    hostile = Path(shutil.copytree(runs[2], tmp_path / "<img src=x onerror=window.hit=1>"))
    record = json.loads((hostile / "resolved_config.json").read_text())
    record["method"] = record["environments"][0]["labels"]["title"] = record["settings"]["model_path"] = HOSTILE
    record["settings"]["lr"] = HOSTILE
    (hostile / "resolved_config.json").write_text(json.dumps(record))
    groups = load_groups([hostile, runs[3]])
    for trace in groups[0].runs[0].allocation.traces:
        object.__setattr__(trace, "task_id", HOSTILE)
        for turn in trace.turns:
            object.__setattr__(turn, "action", "<b>$x$</b>")
    file = tmp_path / "hostile.html"
    file.write_text(report_page(groups, HOSTILE))
    with chromium.Chromium() as browser:
        browser.look(390, 844, dark=True)
        browser.open(file.as_uri(), "document.readyState === 'complete'")
        charts = "[...document.querySelectorAll('img')]"
        assert browser.evaluate(f"{charts}.length") >= 14
        assert browser.evaluate(f"{charts}.every(chart => chart.complete && chart.naturalWidth > 100)")
        assert browser.evaluate(f"{charts}.every(chart => chart.alt.length > 40)")
        assert browser.evaluate("document.title") == HOSTILE
        assert browser.evaluate("window.hit") is None
        assert browser.evaluate("document.querySelectorAll('figure a, script').length") == 0
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert browser.events == []

"""The report page: what it says, and what it does with damaged folders and hostile texts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rewritten_parquet import rewrite
from synthetic_run import START, finished_run

from trial_ray import TRIALConfig, cli
from trial_ray.adapters import alfworld
from trial_ray.adapters.adapter import EnvironmentAdapter, ReportLabels
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.evaluation.statistics import bootstrap_mean, wilson_interval
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.reports.charts import class_chart, class_means, curve_chart, profile_chart
from trial_ray.reports.page import load_groups, report_page
from trial_ray.runs.checkpoints import find_checkpoint, list_checkpoints
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import RecordedRun

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


@pytest.fixture
def undrawn(monkeypatch):
    """Charts are in the page, but not drawn: of what a test reads alone."""
    monkeypatch.setattr("trial_ray.reports.page.chart_svg", lambda chart: "<svg/>")


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


def test_runs_of_two_days_are_one_group(runs, tmp_path):
    copies = [Path(shutil.copytree(run, tmp_path / run.name)) for run in runs[2:]]
    for day, copy in enumerate(copies, 1):
        file = copy / "resolved_config.json"
        record = json.loads(file.read_text())
        record["settings"]["chat_template_date"] = f"2026-01-0{day}"
        file.write_text(json.dumps(record))
    assert [group.title for group in load_groups(copies)] == ["TRIAL (2 seeds)"]


def test_the_summary_gives_every_interval(runs, tmp_path, undrawn):
    assert report(*runs, "--out", tmp_path / "page.html") == 0
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


def test_multipliers_come_from_what_training_recorded(runs):
    groups = load_groups(runs)
    for run in groups[1].runs:
        (file,) = run.path.glob("training/*/*.parquet")
        recorded = pq.read_table(file, columns=["turn_weight"], partitioning=None)["turn_weight"].to_pylist()
        played = run.read(run.recorded[-1])
        assert [turn.turn_weight for each in played for turn in each.turns] == recorded
        assert [each.number for each in run.allocation] == [each.number for each in played if each.trajectory.success]
    (series,) = class_chart(groups)["series"]
    means = class_means([each for run in groups[1].runs for each in run.allocation])
    assert {name: found["mean"] for name, found in series["means"].items()} == pytest.approx(
        {name: found["mean"] for name, found in means.items()}
    )
    assert profile_chart(groups)["turns"] in [each.turns for each in groups[1].runs[0].allocation]


def test_metrics_of_any_size_end_no_report(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    extreme = [{**dict.fromkeys(line, 1e308), "iteration": line["iteration"]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in extreme))
    assert report(run) == 0


def test_groups_are_looked_for_as_far_back_as_the_run_lets_them_wait(tmp_path):
    folder = finished_run(tmp_path / "run")
    record = json.loads((folder / "resolved_config.json").read_text())
    record["settings"]["max_staleness"] = 6
    (folder / "resolved_config.json").write_text(json.dumps(record))
    trajectories = folder / "trajectories"
    (trajectories / "iteration=00012").rename(trajectories / "iteration=00006")
    found = RecordedRun(folder)
    assert (found.allocation[0].iteration, found.reasons()) == (6, [])
    shutil.rmtree(trajectories / "iteration=00006")
    found = RecordedRun(folder)
    assert found.allocation == []
    assert "has none of the groups" in found.reasons()[-1]


def test_an_environment_is_called_by_the_title_that_its_user_gave(tmp_path, undrawn):
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
    assert all(part in said for part in ("My <b>Kitchen</b>", "Put away", "My kitchen's games"))
    classes = {turn.action_class for each in RecordedRun(folder).allocation for turn in each.turns}
    assert classes == {"acquisition", "completion", "inspection/other"}


def test_a_report_without_classes_of_actions_names_none(tmp_path):
    adapter = EnvironmentAdapter("trial/ALFWorld-v0", templates=alfworld.ADAPTER.templates)
    folder = finished_run(tmp_path / "run", adapter=adapter, iterations=2)
    assert report(folder, "--figures", tmp_path / "figures") == 0
    shown = text_of(folder / "report.html") + (tmp_path / "figures" / "figure3.svg").read_text()
    assert "One trajectory's allocation" in shown
    assert [name for name in ("acquisition", "inspection/other", "class of action") if name in shown] == []


DAMAGES = {
    "half a line": ("metrics.jsonl", lambda text: text[: len(text) - 40], "1 line of metrics.jsonl is cut off"),
    "no cost": ("cost.json", None, "cost.json is missing"),
    "cost of another kind": (
        "cost.json",
        lambda text: '{"seconds": 3}',
        "cost.json: KeyError",
    ),
    "half a config": ("resolved_config.json", lambda text: text[:99], "resolved_config.json: JSONDecodeError"),
    "a list": ("run.json", lambda text: "[1]", "has no JSON object"),
    "half an evaluation": ("evaluations/before.json", lambda text: text[:99], "before.json: JSONDecodeError"),
    "killed": ("run.json", lambda text: text.replace('"done"', '"running"'), "The run has not ended, or was killed"),
    "no metrics": ("metrics.jsonl", None, "metrics.jsonl is missing"),
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


def test_what_is_missing_stands_on_the_page_and_in_the_terminal(run, capsys, undrawn):
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
    assert "is damaged: the checksum in its name" in " ".join(RecordedRun(run).reasons())
    rewrite(table, training)
    (trajectories,) = run.glob("trajectories/*/*.parquet")
    older = pq.read_table(trajectories, partitioning=None).replace_schema_metadata({"trial_ray.schema_version": "3"})
    rewrite(older, trajectories)
    assert "schema version 3" in " ".join(RecordedRun(run).reasons())
    shutil.rmtree(run / "training")
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


def test_a_sweep_is_one_curve_a_trial(tmp_path):
    folder = make_sweep(tmp_path / "sweep", failed=False)
    groups = load_groups([folder])
    assert [(group.title, group.runs[0].iterations) for group in groups] == [
        ("TRIAL, clamp_alpha 0.5 (seed 0)", 2),
        ("TRIAL, clamp_alpha 1.0 (seed 1)", 2),
    ]
    assert report(folder) == 0
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    (folder / "TRIAL_env_abc_00000_0").rename(folder / "mine-seed10")
    names = ["mine-seed1", "mine-seed10"]
    renamed = [{**trial, "name": name} for trial, name in zip(trials, names, strict=True)]
    (folder / "sweep.json").write_text(json.dumps({"metric": "x", "mode": "max", "trials": renamed}))
    # The first has no folder, and gets none of another.
    assert [run.path.name for group in load_groups([folder]) for run in group.runs].count("mine-seed10") == 1


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
    assert report(runs[2], "--out", tmp_path / "page.html") == 0
    assert "Charts need matplotlib" in text_of(tmp_path / "page.html")
    assert report(runs[2], "--out", tmp_path / "page.html", "--figures", tmp_path / "figures") == 2
    assert "pip install 'matplotlib" in capsys.readouterr().err


class Tags(HTMLParser):
    """The elements of a page, with their attributes."""

    def __init__(self, source):
        super().__init__()
        self.found = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_of_a_hostile_run_loads_and_runs_nothing(runs, tmp_path):
    hostile = Path(shutil.copytree(runs[2], tmp_path / "<img src=x onerror=window.hit=1>"))
    record = json.loads((hostile / "resolved_config.json").read_text())
    record["method"] = record["environments"][0]["labels"]["title"] = record["settings"]["model_path"] = HOSTILE
    record["settings"]["lr"] = HOSTILE
    (hostile / "resolved_config.json").write_text(json.dumps(record))
    groups = load_groups([hostile, runs[3]])
    for each in groups[0].runs[0].allocation:
        each.trajectory.task_id = HOSTILE
    source = report_page(groups, HOSTILE)
    assert html.escape(HOSTILE) in source
    tags = Tags(source).found
    assert "script" not in {tag for tag, _ in tags}
    assert sum(tag == "img" for tag, _ in tags) >= 14
    assert {name for _, attributes in tags for name in attributes if name == "style" or name.startswith("on")} == set()
    links = [attributes.get("src") or attributes.get("href") or "#" for _, attributes in tags]
    assert all(link.startswith(("#", "data:")) for link in links)
    digest = base64.b64encode(hashlib.sha256(re.search(r"<style>(.*?)</style>", source, re.S)[1].encode()).digest())
    (policy,) = [attributes["content"] for _, attributes in tags if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src 'sha256-{digest.decode()}'" in policy

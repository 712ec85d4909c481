"""The report page: its text and numbers, and damaged folders, sweeps and hostile texts."""

import base64
import hashlib
import html
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
from rewritten_parquet import rewrite
from small_learners import config_of
from synthetic_run import finished_run

from trial_ray import cli
from trial_ray.evaluation.statistics import bootstrap_mean
from trial_ray.files import read_json, write_json
from trial_ray.metrics import TRAINING_SUCCESS
from trial_ray.reports.charts import class_chart, class_means, curve_chart, profile_chart
from trial_ray.reports.page import load_groups, report_page
from trial_ray.runs.checkpoints import find_checkpoint, list_checkpoints
from trial_ray.runs.folder import RunFolder
from trial_ray.runs.reader import RecordedRun

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
SNAPSHOT = Path(__file__).parents[1] / "data/report.txt"
"""Text of a page; the environment variable REWRITE_SNAPSHOTS writes it again."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two methods with two seeds each."""
    root = tmp_path_factory.mktemp("runs")
    runs = [finished_run(root / f"{method}-{seed}", method, seed, 7) for method in ("grpo", "trial") for seed in (0, 1)]
    change_json(runs[0], chat_template_date="2026-01-01")
    return runs


@pytest.fixture
def run(runs, tmp_path):
    """A copy of one run, to damage."""
    return shutil.copytree(runs[2], tmp_path / "damaged")


@pytest.fixture
def no_charts(monkeypatch):
    """Keeps pages from drawing their charts."""
    monkeypatch.setattr("trial_ray.reports.page.chart_svg", lambda chart: "<svg/>")


def report(words):
    return cli.main(f"report {words}".split())


def text_of(source):
    """Return what a reader sees, with one line per line of the page and ``|`` between the cells of a table."""
    source = re.sub(r"<style\b.*?</style>", "", source, flags=re.S)
    lines = re.sub(r"</t[dh]>", " | ", source).splitlines()
    texts = (" ".join(html.unescape(re.sub(r"<[^>]+>", " ", line)).split()) for line in lines)
    return "\n".join(text for text in texts if text) + "\n"


def change_json(folder, **settings):
    """Change settings in the config of a run; returns the whole record."""
    file = folder / "resolved_config.json"
    record = read_json(file)
    record["settings"] |= settings
    write_json(file, record)
    return record


def reasons(folder):
    return " ".join(RecordedRun(folder).reasons())


def test_page_has_the_text_of_its_snapshot(runs, no_charts):
    text = text_of(report_page(load_groups(runs), "Four runs").partition('<section id="configuration"')[0])
    if "REWRITE_SNAPSHOTS" in os.environ:
        SNAPSHOT.write_text(text)
    assert text == SNAPSHOT.read_text()


def test_curves_and_weights_are_means_of_the_files(runs):
    groups = load_groups(runs)
    (series,) = curve_chart(TRAINING_SUCCESS, groups[1:])["series"]
    values = np.array([pandas.read_json(run / "metrics.jsonl", lines=True)[TRAINING_SUCCESS] for run in runs[2:]])
    assert series["mean"] == pytest.approx(values.mean(0))
    interval = bootstrap_mean(values[:, 3:4], resamples=1000)
    assert (series["low"][3], series["high"][3]) == pytest.approx((interval.low, interval.high), rel=1e-5)
    recorded = [trajectory for run in groups[1].runs for trajectory in run.read(7)]
    weights = [
        weight
        for run in runs[2:]
        for weight in pq.read_table(run / "training", partitioning=None)["turn_weight"].to_pylist()
    ]
    assert [turn.turn_weight for trajectory in recorded for turn in trajectory.turns] == weights
    (series,) = class_chart(groups)["series"]
    assert series["means"] == class_means([each for each in recorded if each.trajectory.success])
    assert profile_chart(groups)["turns"] in [trajectory.turns for trajectory in groups[1].runs[0].allocation]


# -- damaged and partial runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("metrics.jsonl", lambda text: text[:-40], "1 line of metrics.jsonl"),
        ("cost.json", lambda text: '{"seconds": 3}', "cost.json: KeyError"),
        ("run.json", lambda text: "[1]", "has no JSON object"),
        ("run.json", lambda text: text.replace('"done"', '"running"'), "has not ended"),
        ("evaluations/before.json", lambda text: text[:99], "before.json: JSONDecodeError"),
    ],
)
def test_damaged_run_names_what_is_missing(run, name, change, words):
    file = run / name
    file.write_text(change(file.read_text()))
    assert words in reasons(run)


def test_report_shows_the_rest_of_a_damaged_run(run, no_charts, tmp_path):
    (run / "cost.json").unlink()
    metrics = run / "metrics.jsonl"
    page = run / "report.html"
    empty = tmp_path / "empty"
    metrics.unlink()
    for iteration in (1, 2):
        RunFolder(run).log(iteration, {TRAINING_SUCCESS: 1e308})
    assert report(run) == 0
    assert "cost.json is missing" in text_of(page.read_text())
    shutil.rmtree(run / "evaluations")
    metrics.write_text('{"iteration": 1, "x')
    page.unlink()
    empty.mkdir()
    assert [*map(report, (run, empty, tmp_path / "x"))] == [2, 2, 2]
    assert not page.exists()


def test_unreadable_weights_are_missing(run):
    (training,) = run.glob("training/*/*.parquet")
    table = pq.read_table(training, partitioning=None)
    training = rewrite(table.drop_columns(["turn_weight"]), training)
    assert "turn_weight" in reasons(run)
    training.write_bytes(b"PAR1 cut")
    assert "checksum" in reasons(run)
    rewrite(table, training)
    (trajectories,) = run.glob("trajectories/*/*.parquet")
    played = pq.read_table(trajectories, partitioning=None)
    rewrite(played.replace_schema_metadata({"trial_ray.schema_version": "3"}), trajectories)
    assert "schema version 3" in reasons(run)


def test_allocation_is_found_within_the_staleness_of_the_run(run):
    change_json(run, max_staleness=6)
    moved = run / "trajectories/iteration=00001"
    moved.with_name("iteration=00007").rename(moved)
    opened = RecordedRun(run)
    assert opened.allocation[0].iteration == 1
    assert opened.reasons() == []
    shutil.rmtree(moved)
    opened = RecordedRun(run)
    assert opened.allocation == []
    assert "has none of the groups" in opened.reasons()[-1]


def test_page_without_matplotlib_has_tables_and_no_charts(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "page.html"
    assert report(f"{runs[2]} --out {page}") == 0
    assert "Charts need matplotlib" in page.read_text()
    assert report(f"{runs[2]} --out {page} --figures {tmp_path}/figures") == 2


# -- sweeps ------------------------------------------------------------------------------------------------------------


def make_trial(path, **settings):
    return RunFolder.of_trial(path, config_of("trial", "m", **settings), ["sweep"])


def write_table(folder, status, **alphas):
    rows = [{"name": name, "parameters": {"clamp_alpha": alpha}, "status": status} for name, alpha in alphas.items()]
    write_json(folder / "sweep.json", {"metric": "x", "mode": "max", "trials": rows})


def test_sweep_has_one_curve_per_trial(tmp_path, capsys):
    trials = [make_trial(tmp_path / f"TRIAL_env_abc_{index}_0", clamp_alpha=0.5 + index / 2) for index in (0, 1)]
    for trial in trials:
        trial.set_state("failed")
    write_table(tmp_path, "failed", abc_0=0.5, abc_1=1.0)
    assert report(tmp_path) == 2
    assert "The trial failed; error.txt" in capsys.readouterr().err
    for trial in trials:
        trial.log(1, {TRAINING_SUCCESS: 0.1})
    titles = [(group.name, group.runs[0].iterations) for group in load_groups([tmp_path])]
    assert titles == [("TRIAL, clamp_alpha 0.5", 1), ("TRIAL, clamp_alpha 1.0", 1)]
    trials[0].path.rename(tmp_path / "mine_10")
    write_table(tmp_path, "done", mine_1=0.5, mine_10=1.0)
    # The first trial has no folder, and does not get the folder of the second.
    assert [run.path.name for group in load_groups([tmp_path]) for run in group.runs].count("mine_10") == 1


def test_repeated_iterations_count_once_and_changes_are_named(tmp_path):
    trial = make_trial(tmp_path)
    for iteration, rate in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5)):
        trial.log(iteration, {TRAINING_SUCCESS: rate})
    make_trial(tmp_path, lr=0.5).log(3, {TRAINING_SUCCESS: 0.7})
    run = RecordedRun(tmp_path)
    assert [[*line.values()] for line in run.metrics] == [[1, 0.1], [2, 0.5], [3, 0.7]]
    assert [(change.iteration, change.name, change.after) for change in run.config.changes] == [(3, "lr", 0.5)]


def test_checkpoints_that_tune_removed_are_not_listed(tmp_path):
    trial = make_trial(tmp_path / "trial")
    for iteration in (5, 10):
        saved = trial.path / f"checkpoint_{iteration // 5 - 1:06d}"
        write_json(saved / "rllib_checkpoint.json", {})
        trial.link_checkpoint(iteration, saved)
    link = trial.path / "checkpoints/000010"
    assert find_checkpoint(link) == find_checkpoint(trial.path) == link
    shutil.rmtree(trial.path / "checkpoint_000000")
    moved = trial.path.rename(tmp_path / "moved")
    assert list_checkpoints(moved / "checkpoints") == [moved / "checkpoints/000010"]


# -- hostile texts -----------------------------------------------------------------------------------------------------


def elements(source):
    """Return the elements of a page, with their attributes."""
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: found.append((tag, dict(attrs)))
    parser.feed(source)
    return found


def test_page_of_a_hostile_run_loads_and_runs_nothing(runs, tmp_path):
    hostile = shutil.copytree(runs[2], tmp_path / "<img src=x onerror=window.hit=1>")
    record = change_json(hostile, model_path=HOSTILE, lr=HOSTILE)
    record["method"] = record["environments"][0]["labels"]["title"] = HOSTILE
    write_json(hostile / "resolved_config.json", record)
    groups = load_groups([hostile, runs[3]])
    for trajectory in groups[0].runs[0].allocation:
        trajectory.trajectory.task_id = HOSTILE
    source = report_page(groups, HOSTILE)
    assert html.escape(HOSTILE) in source
    tags = elements(source)
    assert "script" not in {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name == "style" or name.startswith("on")]
    assert all(
        (attributes.get("src") or attributes.get("href") or "#").startswith(("#", "data:")) for _, attributes in tags
    )
    digest = base64.b64encode(hashlib.sha256(re.search(r"<style>(.*?)</style>", source, re.S)[1].encode()).digest())
    (policy,) = [attributes["content"] for _, attributes in tags if "http-equiv" in attributes]
    assert policy.startswith(f"default-src 'none'; img-src data:; style-src 'sha256-{digest.decode()}'; ")

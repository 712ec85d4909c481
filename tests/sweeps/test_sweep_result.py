"""What a sweep's trials are put together to: points over seeds, tables, files, capacity, checkpoints of a population."""

from __future__ import annotations

import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from trial_ray.errors import CheckpointError, ConfigError, UserInputError, first_line
from trial_ray.files import examples_folder
from trial_ray.runs.config_record import to_record
from trial_ray.runs.experiment import load_experiment
from trial_ray.sweeps.callbacks import PopulationCheckpoints, StopCriteria
from trial_ray.sweeps.outputs import plot_map, write_outputs
from trial_ray.sweeps.plan import SweepFile
from trial_ray.sweeps.result import SweepResult, TrialRecord
from trial_ray.sweeps.tuner import Capacity, _last_value

METRIC = "env_runners/success_rate"
EXAMPLES = examples_folder()


def trial(name, coefficient, seed, metric, status="done", error=""):
    return TrialRecord(name, {"hindsight_coeff": coefficient, "seed": seed}, status, 2, metric, 9.0, error)


def result(mode="max"):
    return SweepResult(
        METRIC,
        mode,
        [
            trial("a", 0.1, 0, 0.2),
            trial("b", 0.1, 1, 0.4),
            trial("c", 0.1, 2, 0.6),
            trial("d", 0.2, 0, 0.7),
            trial("e", 0.2, 1, None, "failed", "[red]EngineError: died"),
            trial("f", 0.3, 0, 0.5, "unfinished"),
        ],
    )


def printed(table) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_points_are_means_over_seeds_with_students_interval():
    first, second, third = result().points()  # complete ones before the others
    assert first.mean == pytest.approx(0.4)
    # t(0.975, 2 degrees of freedom) = 4.3027, standard deviation 0.2
    assert first.half_width == pytest.approx(4.3027 * 0.2 / 3**0.5, rel=1e-4)
    assert (second.parameters, second.values, second.lacks) == ({"hindsight_coeff": 0.2}, (0.7,), "1 failed")
    assert second.half_width is None
    assert third.parameters == {"hindsight_coeff": 0.3}
    assert result("min").points()[0].parameters == {"hindsight_coeff": 0.1}
    assert result().best().name == "c"


def test_tables_put_the_best_first_and_tell_why_trials_failed():
    outcome = result()
    assert [each.name for each in outcome.trials] == ["d", "c", "b", "a", "f", "e"]
    assert (outcome.failed, outcome.unfinished) == (1, 1)
    assert "[red]EngineError: died" in printed(outcome.table())
    assert "0.4 ± 0.5 (n=3)" in printed(outcome.points_table())


def test_the_dataframe_has_a_row_a_trial_and_the_files_give_the_same(tmp_path):
    import pandas

    outcome = result()
    frame = outcome.dataframe()
    columns = ["trial", "hindsight_coeff", "seed", METRIC, "status", "iterations", "seconds", "error"]
    assert list(frame) == columns
    assert frame.groupby("hindsight_coeff")[METRIC].mean()[0.1] == pytest.approx(0.4)
    outcome.save(tmp_path)
    pandas.testing.assert_frame_equal(
        pandas.read_csv(tmp_path / "results.csv").fillna(0), frame.replace("", 0).fillna(0), check_dtype=False
    )
    assert SweepResult.load(tmp_path) == outcome


def test_a_folder_that_was_cut_off_or_is_another_versions_is_refused(tmp_path):
    for content, words in (
        (None, "was interrupted"),
        ('{"schema', "Cannot read"),
        ('{"schema_version": 99}', "another version"),
    ):
        if content:
            (tmp_path / "sweep.json").write_text(content)
        with pytest.raises(CheckpointError, match=words):
            SweepResult.load(tmp_path)


def test_the_best_point_becomes_a_file_that_training_accepts(tmp_path):
    file = SweepFile.load(EXAMPLES / "sweeps" / "lambda_alpha_seeds.py")
    chosen = {"hindsight_coeff": 0.02, "clamp_alpha": 0.5, "seed": 1}
    outcome = SweepResult(METRIC, "max", [TrialRecord("a", chosen, "done", 2, 0.5, 9.0)])
    file.scheduler.set_search_properties(METRIC, "max")  # as Tune does
    lines = list(write_outputs(file, outcome, tmp_path))
    assert f"trial-ray train {tmp_path / 'best.py'}" in lines[-1]
    written = load_experiment(tmp_path / "best.py")
    expected = file.config.copy(copy_frozen=False).training(hindsight_coeff=0.02, clamp_alpha=0.5).debugging(seed=1)
    assert to_record(written.config)["settings"] == to_record(expected)["settings"]
    assert written.stop == file.stop
    written.config.validate()


def test_the_best_of_a_file_with_objects_keeps_overrides_and_finds_modules_beside_the_file(tmp_path):
    shutil.copy(EXAMPLES / "own_environment.py", tmp_path / "played_beside.py")
    source = tmp_path / "search.py"
    source.write_text(
        "from ray import tune\nimport played_beside as _beside\n"
        "config = _beside.config.training(hindsight_coeff=tune.grid_search([0.005, 0.02]))\n"
        'stop = {"training_iteration": 20}\n'
    )
    file = SweepFile.load(source, overrides=["lr=0.002"])
    outcome = SweepResult(METRIC, "max", [TrialRecord("a", {"hindsight_coeff": 0.02}, "done", 2, 0.5, 9.0)])
    list(write_outputs(file, outcome, tmp_path / "out"))
    sys.modules.pop("played_beside")
    written = load_experiment(tmp_path / "out" / "best.py").config
    assert (written.lr, written.hindsight_coeff) == (0.002, 0.02)
    source.write_text(source.read_text() + "config.training(group_size=16)\n")
    with pytest.raises(UserInputError, match="defines another sweep than the one whose best point"):
        load_experiment(tmp_path / "out" / "best.py")


def test_an_object_as_the_best_value_is_said_to_have_no_file(tmp_path):
    source = tmp_path / "search.py"
    source.write_text(
        "from ray import tune\nimport runpy\n"
        f"config = runpy.run_path({str(EXAMPLES / 'own_environment.py')!r})['config']\n"
        "config.training(reward=tune.grid_search([lambda episode: 1.0, lambda episode: 0.0]))\n"
        'stop = {"training_iteration": 20}\n'
    )
    file = SweepFile.load(source)
    chosen = {"reward": file.searched["reward"]["grid_search"][0]}
    lines = list(
        write_outputs(file, SweepResult(METRIC, "max", [TrialRecord("a", chosen, "done", 2, 0.5, 9.0)]), tmp_path)
    )
    assert "no best.py: the value of reward is an object" in lines[-1]
    assert not (tmp_path / "best.py").exists()


# -- what fits ---------------------------------------------------------------------------------------------------------

SMALL = {"CPU": 2.0, "memory": 14e9, "object_store_memory": 6e9}


def test_as_many_trials_run_as_have_cpus_and_memory():
    configs = list(SweepFile.load(EXAMPLES / "sweeps" / "lambda_alpha.py").configs())
    assert (
        Capacity.of(configs, {**SMALL, "CPU": 64}).trials == Capacity.of(configs, {**SMALL, "CPU": 64}).by_memory == 5
    )
    found = Capacity.of(configs, SMALL)
    assert (found.by_resources, found.trials) == (1, 1)
    with pytest.raises(ConfigError, match=r"reserves 1\.5 of 1 CPUs"):
        Capacity.of(configs, {**SMALL, "CPU": 1}).require_one(local=True)
    Capacity.of(configs, {**SMALL, "CPU": 1}).require_one(local=False)  # a cluster may grow
    configs[0].engines(num_gpus_per_engine=1)
    assert "1 of 0 GPUs" in Capacity.of(configs, SMALL).describe(4, 1)


# -- beside the trials -------------------------------------------------------------------------------------------------


def test_a_copied_checkpoint_stays_until_the_copy_has_one_of_its_own(tmp_path):
    def wrote(owner, number):
        folder = tmp_path / owner.name / f"checkpoint_{number}"
        folder.mkdir(parents=True)
        owner.checkpoint = SimpleNamespace(path=str(folder))
        owner.run_metadata.checkpoint_manager._checkpoint_results.append(SimpleNamespace(checkpoint=owner.checkpoint))
        callback.on_checkpoint(0, [one, other], owner, owner.checkpoint)

    def trial_of(name):
        manager = SimpleNamespace(_checkpoint_results=[])
        return SimpleNamespace(name=name, checkpoint=None, run_metadata=SimpleNamespace(checkpoint_manager=manager))

    callback = PopulationCheckpoints(kept=2)
    one, other = trial_of("one"), trial_of("other")
    wrote(one, 0)
    other.checkpoint = one.checkpoint  # it is to begin again from there
    for number in (1, 2, 3):
        wrote(one, number)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "checkpoint_0",
        "checkpoint_2",
        "checkpoint_3",
    ]
    wrote(other, 0)
    wrote(one, 4)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["checkpoint_3", "checkpoint_4"]


def test_stop_criteria_refuse_what_the_first_result_does_not_hold():
    with pytest.raises(ConfigError, match="a key of stop is 'iterations'"):
        StopCriteria({"iterations": 2}, METRIC)("a", {"env_runners": {"success_rate": 0.5}})


def test_of_an_actors_traceback_the_error_itself_is_kept():
    text = "ray::TRIAL.train()\nTraceback (most recent call last):\n  File x, line 1\ntrial_ray.errors.EngineError: it died\n"
    assert first_line(RuntimeError(text)) == "trial_ray.errors.EngineError: it died"
    assert first_line(RuntimeError("")) == "RuntimeError"


# -- the edges of ranking ----------------------------------------------------------------------------------------------


def test_infinite_metrics_and_searched_values_leave_everything_else_written(tmp_path):
    file = SweepFile.load(EXAMPLES / "sweeps" / "lambda_alpha.py")
    chosen = [(0.02, math.inf, 0.5), (0.02, 1.0, 0.25), (0.1, math.nan, math.inf), (0.1, 0.5, math.nan)]
    outcome = SweepResult(
        METRIC,
        "max",
        [
            TrialRecord(f"t{index}", {"hindsight_coeff": first, "clamp_alpha": second}, "done", 2, value, 9.0)
            for index, (first, second, value) in enumerate(chosen)
        ],
    )
    list(write_outputs(file, outcome, tmp_path))
    assert load_experiment(tmp_path / "best.py").config.clamp_alpha == math.inf
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)  # strict JSON
    assert SweepResult.load(tmp_path).best().name == "t0"


def test_failed_and_incomplete_trials_rank_behind_and_are_said_to_be_so(tmp_path):
    trials = [
        trial("a", 0.1, 0, 0.2),
        trial("b", 0.1, 1, 0.3),
        trial("c", 0.2, 0, 0.9, "failed", "EngineError: died"),
        trial("d", 0.2, 1, 0.8),
        trial("e", 0.3, 0, 0.7, "unfinished"),
        trial("f", 0.3, 1, 0.7),
        trial("g", 0.4, 0, 0.95),  # the other seed did not start
    ]
    outcome = SweepResult(METRIC, "max", trials, repeats=2)
    points = outcome.points()
    assert [point.parameters["hindsight_coeff"] for point in points] == [0.1, 0.4, 0.2, 0.3]
    assert [point.lacks for point in points] == ["", "1 not started", "1 failed", "1 unfinished"]
    assert outcome.best().name == "b"
    assert [each.name for each in outcome.trials] == ["g", "d", "f", "b", "a", "e", "c"]

    # Without a complete point the best of the others is written.
    file = SweepFile.load(EXAMPLES / "sweeps" / "lambda_alpha_seeds.py")
    failed = TrialRecord("c", {"hindsight_coeff": 0.02, "clamp_alpha": 0.5, "seed": 0}, "failed", 2, 0.9, 9.0, "died")
    done = TrialRecord("d", {**failed.parameters, "seed": 1}, "done", 2, 0.8, 9.0)
    assert SweepResult(METRIC, "max", [failed, done]).best().name == "d"
    alone = SweepResult(METRIC, "max", [failed])
    assert "no best.py" in list(write_outputs(file, alone, tmp_path))[-1]


def test_the_last_value_of_a_trial_that_diverged_is_no_earlier_one():
    import pandas

    history = pandas.DataFrame({METRIC: [0.9, math.nan], "loss": [1.0, math.nan]})
    ended = SimpleNamespace(metrics_dataframe=history)
    assert math.isnan(_last_value(ended, {"env_runners": {"success_rate": math.nan}}, METRIC))
    assert _last_value(ended, {"env_runners": {}}, METRIC) == 0.9  # not played in the last iteration
    assert _last_value(SimpleNamespace(metrics_dataframe=None), {}, METRIC) is None


def words(files) -> str:
    png, svg = files
    assert png.read_bytes()[:4] == b"\x89PNG"
    return svg.read_text(encoding="utf-8")


def grid():
    chosen = [(coefficient, alpha) for coefficient in (0.0, 0.02) for alpha in (0.5, 1.0)]
    return [
        ({"hindsight_coeff": coefficient, "clamp_alpha": alpha}, coefficient + alpha, 0.125)
        for coefficient, alpha in chosen
    ]


def test_a_grid_is_shown_as_cells_with_intervals(tmp_path):
    text = words(plot_map(grid(), METRIC, tmp_path / "map"))
    for part in ("λ (hindsight_coeff)", "α (clamp_alpha)", "success_rate", ">1.02<", ">± 0.12<", "95 % interval"):
        assert part in text


def test_what_forms_no_grid_has_no_map(tmp_path):
    points = [({"a": 10.0**-index, "b": index % 7 + 0.5}, index / 20, None) for index in range(20)]
    assert plot_map(points, METRIC, tmp_path / "none") == plot_map([], METRIC, tmp_path / "none") == []

"""Results of a sweep: points over seeds, tables, the best configuration, the map, capacity, and a population's checkpoints."""

import itertools
import json
import math
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pandas
import pytest
from rich.console import Console

from trial_ray.errors import CheckpointError, ConfigError, UserInputError, first_line
from trial_ray.files import examples_folder
from trial_ray.runs.config_record import to_record
from trial_ray.runs.experiment import load_experiment
from trial_ray.sweeps.callbacks import TrialCallback
from trial_ray.sweeps.outputs import plot_map, write_outputs
from trial_ray.sweeps.plan import load_plan
from trial_ray.sweeps.results import SweepResult, TrialRecord
from trial_ray.sweeps.run import Capacity, _last_value

METRIC = "env_runners/success_rate"
EXAMPLES = examples_folder()
OWN_ENVIRONMENT = EXAMPLES / "own_environment.py"


def trial(name, metric, status="done", error="", **parameters):
    return TrialRecord(name, parameters, status, 2, metric, 9.0, error)


def outcome(mode="max"):
    rows = [
        ("a", 0.1, 0, 0.2),
        ("b", 0.1, 1, 0.3),
        ("c", 0.2, 0, 0.9, "failed", "[red]EngineError: died"),
        ("d", 0.2, 1, 0.8),
        ("e", 0.3, 0, 0.7, "unfinished"),
        ("f", 0.3, 1, 0.7),
        ("g", 0.4, 0, 0.95),  # the other seed did not start
        ("h", 0.5, 0, math.nan),
        ("i", 0.5, 1, None),
    ]
    trials = [trial(name, *rest, hindsight_coeff=value, seed=seed) for name, value, seed, *rest in rows]
    return SweepResult(METRIC, mode, trials, repeats=2)


def outputs(plan, folder, *trials):
    return list(write_outputs(plan, SweepResult(METRIC, "max", list(trials)), folder))


def test_points_rank_complete_ones_first_with_t_intervals():
    result = outcome()
    points = result.points()
    assert [*points["hindsight_coeff"]] == [0.1, 0.4, 0.2, 0.3, 0.5]
    assert [*points["mean"][:4]] == pytest.approx([0.25, 0.95, 0.8, 0.7])
    # t(0.975, 1 degree of freedom) = 12.7062, standard deviation of the mean 0.05
    assert points["half_width"][0] == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert points["half_width"][1:].isna().all()  # also of equal values
    assert [*points["trials"]] == [2, 1, 1, 2, 0]
    assert [*points["lacks"]] == ["", "1 not started", "1 failed", "1 unfinished", "2 without a value"]
    least = outcome("min")
    assert [*least.points()["hindsight_coeff"]] == [0.1, 0.3, 0.2, 0.4, 0.5]
    assert result.best().name == "b"
    assert least.best().name == "a"
    _, done, *_, failed, _, _ = result.trials
    assert SweepResult(METRIC, "max", [failed, done]).best().name == "d"
    assert SweepResult(METRIC, "max", [failed]).best() is None


def test_tables_and_files_have_the_best_trial_first(tmp_path):
    result = outcome()
    frame = result.dataframe()
    assert "".join(frame["trial"]) == "gdfbaechi"
    assert result.failed == result.unfinished == 1
    console = Console(width=160, record=True)
    console.print(result.table(), result.points_table())
    assert "[red]EngineError: died" in console.export_text()
    assert SweepResult(METRIC, "max", result.trials[:1]).points_table() is None
    result.save(tmp_path)
    saved = pandas.read_csv(tmp_path / "results.csv")
    pandas.testing.assert_frame_equal(saved.fillna(0), frame.replace("", 0).fillna(0), check_dtype=False)
    pandas.testing.assert_frame_equal(SweepResult.load(tmp_path).points(), result.points())


@pytest.mark.parametrize("content", [None, '{"schema', '{"schema_version": 99}'])
def test_unreadable_result_is_rejected(content, tmp_path):
    if content:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(CheckpointError):
        SweepResult.load(tmp_path)


def test_diverged_trial_does_not_keep_an_earlier_value():
    ended = SimpleNamespace(metrics_dataframe=pandas.DataFrame({METRIC: [0.9, math.nan]}))
    assert math.isnan(_last_value(ended, {"env_runners": {"success_rate": math.nan}}, METRIC))
    assert _last_value(ended, {"env_runners": {}}, METRIC) == 0.9  # the last iteration had no evaluation
    assert _last_value(SimpleNamespace(metrics_dataframe=None), {}, METRIC) is None


def test_actor_error_is_the_last_line_of_its_traceback():
    text = "ray::TRIAL.train()\nTraceback (most recent call last):\n  File x, line 1\ntrial_ray.errors.EngineError: it died\n"
    assert first_line(RuntimeError(text)) == "trial_ray.errors.EngineError: it died"
    assert first_line(RuntimeError("")) == "RuntimeError"


# -- best configuration ------------------------------------------------------------------------------------------------


def test_best_file_keeps_overrides_and_method_and_finds_modules_beside_it(tmp_path, monkeypatch):
    shutil.copy(OWN_ENVIRONMENT, tmp_path / "played_beside.py")
    source = tmp_path / "search.py"
    best = tmp_path / "out/best.py"
    source.write_text(
        "from ray import tune\nimport played_beside as _beside\n"
        "config = _beside.config.training(hindsight_coeff=tune.grid_search([0.005, 0.02]))\n"
        'stop = {"training_iteration": 20}\n'
    )
    (tmp_path / "mine.py").write_text(
        "from trial_ray.algorithms.methods.trial import UniformConfig\n\n\nclass CONFIG(UniformConfig):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    plan = load_plan(source, overrides=["lr=0.002"], method="mine.py")
    outputs(plan, best.parent, trial("a", 0.5, hindsight_coeff=0.02))
    sys.modules.pop("played_beside")
    monkeypatch.chdir("/")
    written = load_experiment(best).config
    assert type(written) is type(plan.config)
    assert written.lr == 0.002
    assert written.hindsight_coeff == 0.02
    source.write_text(source.read_text() + "config.training(group_size=16)\n")
    with pytest.raises(UserInputError, match="another sweep"):
        load_experiment(best)


def test_best_value_that_is_an_object_has_no_file(tmp_path):
    source = tmp_path / "search.py"
    source.write_text(
        f"from ray import tune\nimport runpy\nconfig = runpy.run_path({str(OWN_ENVIRONMENT)!r})['config']\n"
        "config.training(reward=tune.grid_search([lambda episode: 1.0, lambda episode: 0.0]))\n"
        'stop = {"training_iteration": 20}\n'
    )
    plan = load_plan(source)
    *_, message = outputs(plan, tmp_path, trial("a", 0.5, reward=plan.spaces["reward"]["grid_search"][0]))
    assert "no best.py: the value of reward" in message
    assert not (tmp_path / "best.py").exists()


def test_best_point_becomes_an_experiment_file_with_its_infinite_values(tmp_path):
    plan = load_plan(EXAMPLES / "sweeps/lambda_alpha_seeds.py")
    plan.scheduler.set_search_properties(METRIC, "max")  # as Tune does
    values = {math.inf: 0.5, 1.0: 0.25, math.nan: math.inf, 0.5: math.nan}
    trials = [
        trial(f"alpha {alpha}", value, hindsight_coeff=0.02, clamp_alpha=alpha, seed=1)
        for alpha, value in values.items()
    ]
    *_, message = outputs(plan, tmp_path, *trials)
    assert f"trial-ray train {tmp_path}/best.py" in message
    written = load_experiment(tmp_path / "best.py")
    expected = plan.config.copy(copy_frozen=False).training(hindsight_coeff=0.02, clamp_alpha=math.inf)
    assert to_record(written.config)["settings"] == to_record(expected.debugging(seed=1))["settings"]
    assert written.stop == plan.stop
    json.loads((tmp_path / "sweep.json").read_text(), parse_constant=pytest.fail)  # strict JSON
    assert SweepResult.load(tmp_path).best().name == "alpha inf"


# -- map ---------------------------------------------------------------------------------------------------------------


def test_map_shows_a_grid_of_cells_with_intervals(tmp_path):
    def plot(rows):
        points = pandas.DataFrame(rows).assign(half_width=0.125, trials=1, iterations=1, lacks="", best="a")
        return plot_map(points, METRIC, tmp_path / "map")

    grid = itertools.product((0.0, 0.02), (0.5, 1.0))
    png, svg = plot([{"hindsight_coeff": one, "clamp_alpha": other, "mean": one + other} for one, other in grid])
    assert png.read_bytes()[:4] == b"\x89PNG"
    text = svg.read_text()
    for part in ("λ (hindsight_coeff)", "α (clamp_alpha)", "success_rate", ">1.02<", ">± 0.12<"):
        assert part in text
    scattered = [{"a": 10.0**-index, "b": index % 7 + 0.5, "mean": index / 20} for index in range(20)]
    for number in (20, 9, 1):
        assert plot(scattered[:number]) == []


# -- beside the trials -------------------------------------------------------------------------------------------------


def test_trials_at_a_time_fit_cpus_and_memory():
    cluster = {"CPU": 2.0, "memory": 14e9, "object_store_memory": 6e9}
    configs = load_plan(EXAMPLES / "sweeps/lambda_alpha.py").configs
    large = Capacity.of(configs, {**cluster, "CPU": 64})
    assert large.trials == large.by_memory == 5
    assert Capacity.of(configs, cluster).trials == 1
    single_core = Capacity.of(configs, {**cluster, "CPU": 1})
    with pytest.raises(ConfigError, match=r"1\.5 of 1 CPUs"):
        single_core.require_one(local=True)
    single_core.require_one(local=False)  # a cluster may grow
    configs[0].engines(num_gpus_per_engine=1)
    assert "1 of 0 GPUs" in Capacity.of(configs, cluster).describe(4, 1)


def test_copied_checkpoint_is_kept_until_the_copy_has_its_own(tmp_path):
    callback = TrialCallback(["sweep"], [], "sweep", kept=2)
    members = first, second = [Mock(checkpoint=None, last_result={"training_iteration": 1}) for _ in range(2)]
    callback._open = {member.trial_id: (Mock(), Mock()) for member in members}
    for member in members:
        member.run_metadata.checkpoint_manager._checkpoint_results = []

    def kept_after(owner, *numbers):
        for number in numbers:
            folder = tmp_path / f"{members.index(owner)}/checkpoint_{number}"
            folder.mkdir(parents=True)
            owner.checkpoint = SimpleNamespace(path=str(folder))
            owner.run_metadata.checkpoint_manager._checkpoint_results.append(Mock(checkpoint=owner.checkpoint))
            callback.on_checkpoint(0, members, owner, owner.checkpoint)
        return sorted(int(path.name[-1]) for path in (tmp_path / "0").iterdir())

    kept_after(first, 0)
    second.checkpoint = first.checkpoint  # the second member is to start again from there
    assert kept_after(first, 1, 2, 3) == [0, 2, 3]
    kept_after(second, 0)
    assert kept_after(first, 4) == [3, 4]

"""Studies: their runs, the configs of their trials, the final evaluation, and the tables and figures of finished runs."""

from types import SimpleNamespace

import pandas
import pytest
from evaluation_samples import coin_flips, evaluation

from trial_ray import GRPOConfig, cli
from trial_ray.algorithms.config import NAMED_CONFIG
from trial_ray.cli import sweep
from trial_ray.errors import ConfigError
from trial_ray.evaluation.results import EvaluationResult
from trial_ray.runs.folder import RunFolder
from trial_ray.sweeps.plan import recorded_config
from trial_ray.sweeps.results import SweepResult, TrialRecord
from trial_ray.sweeps.run import Sweep
from trial_ray.sweeps.study import SCALES, evaluation_file, plan_study

SCALE = """
from trial_ray.algorithms import TRIALConfig
from trial_ray.sweeps.study import EvaluationSplit, Scale


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny"})
        .rl_module(model_path=f"models/{backbone}")
        .training(hindsight_start_iteration=2, lr=1e-5)
    )


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSplit("generated", 20),)},
    backbones=("A", "B"),
    controlled_backbone="B",
    iterations=10,
    seeds=2,
    method_settings={"serl": {"rescaling_iterations": 5}, "rlsd": {"rescaling_iterations": 10}},
    method_seeds={"gigpo": 1},
)
"""


@pytest.fixture
def scale(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCALE)
    return str(path)


def run_cli(words):
    return cli.main(f"sweep {words}".split())


def test_runs_share_all_settings_except_those_of_their_methods(scale):
    plan = plan_study("table2", scale, overrides=["lr=1e-4"])
    assert len(plan.runs) == plan.sweep.num_trials == 2 * 6 * 2  # backbones, methods, seeds
    space = plan.sweep.param_space[NAMED_CONFIG]["grid_search"]
    for named, (name, run) in zip(space, plan.runs.items(), strict=True):
        trial = {NAMED_CONFIG: named}
        config = GRPOConfig().update_from_dict(trial)
        assert type(config) is type(run.config)
        assert config.lr == 1e-4
        assert config.seed == run.seed
        assert config.model_path == f"models/{run.backbone}"
        assert config.training_folder == "training"
        assert config.chat_template_date
        assert plan.sweep.parameters(SimpleNamespace(path=f"out/{name}")) == run.parameters
        assert plan.sweep.trial_name(SimpleNamespace(config=trial)) == name
    assert plan.runs["alfworld-a-serl-seed1"].config.rescaling_iterations == 5
    assert {run.backbone for run in plan_study("table3", scale).runs.values()} == {"B"}
    shortened = plan_study("study", scale)
    runs = [*shortened.runs.values()]
    assert [run.seed for run in runs if run.method == "gigpo"] == [0]
    assert shortened.sweep.repeats == 1
    assert plan.sweep.repeats == 2
    assert runs == sorted(runs, key=lambda run: run.seed)  # An interrupted study has the same seeds of every method.
    with pytest.raises(ConfigError, match="rescaling_iterations"):
        plan_study("table2", scale, iterations=4)


def test_last_iteration_is_evaluated_in_the_run_folder(scale, tmp_path, monkeypatch):
    run = plan_study("pair", scale).runs["alfworld-b-trial-seed1"]
    played = []

    def evaluate_set(evaluation_set, entry):
        played.append((evaluation_set, entry.split))
        return evaluation([True], split="generated")

    monkeypatch.setattr("trial_ray.sweeps.study.trial_folder", lambda algorithm: tmp_path / run.name)
    monkeypatch.setattr("trial_ray.sweeps.study.choose_evaluation_set", lambda entry, tasks: tasks)
    (evaluate,) = run.config.callbacks_on_train_result
    for iteration in (9, 10):
        assert not played
        evaluate(algorithm=SimpleNamespace(config=run.config, iteration=iteration, evaluate_set=evaluate_set))
    assert played == [(20, "generated")]
    written = EvaluationResult.load(evaluation_file(tmp_path / run.name, run.splits[0], 10))
    assert written.labels == {"method": "trial", "backbone": "B", "seed": 1, "iteration": 10}


def finish(run, folder, rate):
    """Write what a trained and evaluated trial leaves."""
    trial = RunFolder.of_trial(folder, recorded_config(run.config), ["test"])
    evaluation(coin_flips(20, rate, run.seed), split="generated").save(evaluation_file(folder, run.splits[0], 10))
    for iteration in range(1, 11):
        trial.log(iteration, {"env_runners/success_rate": rate * iteration / 10})
    trial.set_state("done")


def test_finished_study_becomes_tables_and_figures_without_ray(scale, tmp_path, monkeypatch):
    plan = plan_study("table3", scale)
    out = tmp_path / "out"
    command = f"table3 --scale {scale} --out {out}"
    assert run_cli(f"{command} --dry-run") == 0
    assert not out.exists()
    Sweep(plan.sweep, out).begin()
    for name, run in plan.runs.items():
        finish(run, out / name, {"grpo": 0.2, "trial": 0.8}.get(run.method, 0.5))
    trials = [TrialRecord(name, run.parameters, "done", 10, 0.5, 9.0) for name, run in plan.runs.items()]
    SweepResult(plan.sweep.metric, "max", trials, 2).save(out)
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    assert run_cli(command) == 0
    assert (out / "report.html").is_file()
    cells = pandas.read_csv(out / "table3.csv")
    mean = cells[(cells["method"] == "grpo") & (cells["column"] == "Avg.")]["mean"].item()
    assert mean == pytest.approx(sum(coin_flips(20, 0.2, seed).mean() for seed in (0, 1)) / 2)
    assert {*pandas.read_csv(out / "table3_differences.csv")["reference"]} == {"grpo", "uniform", "permuted"}
    assert "TRIAL" in (out / "table3.tex").read_text()
    assert (out / "figures/alfworld-b/success.png").is_file()
    # Another number of seeds is another sweep, also if the first sweep is incomplete.
    assert run_cli(f"{command} --seeds 1") == 2
    (out / "sweep.json").unlink()
    assert run_cli(f"{command} --seeds 1") == 2


def test_missing_or_empty_scale_is_rejected(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("scale = 3")
    for words, named in {"table9": "table9", "table3 --scale huge": "huge", "table3 --scale empty.py": ""}.items():
        assert run_cli(words) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_the_package_are_valid(name):
    for study in sweep.STUDIES:
        assert len(plan_study(study, name, seeds=1).runs) >= 2

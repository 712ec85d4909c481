"""A study as a sweep: its runs, their trials' configs, their final evaluations, and what finished runs become."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pandas
import pytest
from evaluation_samples import coin_flips, evaluation

from trial_ray import cli, reproduction
from trial_ray.algorithms.config import NAMED_CONFIG
from trial_ray.algorithms.grpo import GRPOConfig
from trial_ray.errors import ConfigError
from trial_ray.reproduction import STUDIES, StudySweep, evaluation_file, load_scale, scale_file, scale_names
from trial_ray.runs.folder import RunFolder
from trial_ray.sweeps.plan import recorded_config
from trial_ray.sweeps.result import SweepResult, TrialRecord
from trial_ray.sweeps.tuner import Sweep

SCALE = """
from trial_ray.algorithms import TRIALConfig
from trial_ray.reproduction import EvaluationSet, Scale


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny"})
        .rl_module(model_path=f"models/{backbone}")
        .training(hindsight_start_iteration=2, lr=1e-5)
    )


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSet("generated", 20),)},
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
    return path


def plan(name, scale, seeds=None, iterations=None, overrides=()):
    path = scale_file(str(scale))
    return StudySweep.plan(STUDIES[name], load_scale(str(scale)), path, seeds, iterations, list(overrides))


def finish(sweep, name, folder, rate, iterations=10):
    """What a trial leaves that has been trained and evaluated."""
    run = sweep.runs[name]
    made = RunFolder.of_trial(folder / name, recorded_config(run.config), ["test"])
    evaluation(coin_flips(20, rate, run.seed), split="generated").save(
        evaluation_file(folder / name, run.sets[0], iterations)
    )
    for iteration in range(1, iterations + 1):
        made.log(iteration, {"env_runners/success_rate": rate * iteration / iterations})
    made.set_state("done")


def test_runs_share_all_settings_but_their_methods_own(scale):
    sweep = plan("table2", scale, overrides=["lr=1e-4"])
    assert len(sweep.runs) == sweep.num_trials == 2 * 6 * 2  # backbones, methods, seeds
    assert {run.config.lr for run in sweep.runs.values()} == {1e-4}
    run = sweep.runs["alfworld-a-serl-seed1"]
    assert (run.config.model_path, run.config.seed, run.config.rescaling_iterations) == ("models/A", 1, 5)
    assert {run.backbone for run in plan("table3", scale).runs.values()} == {"B"}
    assert [run.seed for run in plan("study", scale).runs.values() if run.method == "gigpo"] == [0]
    with pytest.raises(ConfigError, match="rescaling_iterations"):
        plan("table2", scale, iterations=4)


def test_a_trial_has_the_config_of_its_run(scale):
    """Out of what Tune passes on, by the algorithm's own default config."""
    sweep = plan("table2", scale)
    space = sweep.param_space()[NAMED_CONFIG]["grid_search"]
    for (name, _), run in zip(space, sweep.runs.values(), strict=True):
        trial = {NAMED_CONFIG: next(each for each in space if each[0] == name)}
        config = GRPOConfig().update_from_dict(trial)
        assert type(config) is type(run.config)
        assert (config.seed, config.model_path) == (run.seed, run.config.model_path)
        assert config.training_folder == "training"
        assert config.chat_template_date
        assert sweep.parameters(SimpleNamespace(path=f"out/{name}")) == run.parameters
        assert sweep.trial_name(SimpleNamespace(config=trial)) == name


def test_the_last_iteration_plays_the_final_sets_into_the_runs_folder(scale, tmp_path, monkeypatch):
    run = plan("pair", scale).runs["alfworld-b-trial-seed1"]
    played = []

    def evaluate_set(evaluation_set, entry):
        played.append((evaluation_set, entry.split))
        return evaluation(coin_flips(20, 0.5, 1), split="generated")

    algorithm = SimpleNamespace(config=run.config, iteration=9, evaluate_set=evaluate_set)
    monkeypatch.setattr(reproduction, "trial_folder", lambda algorithm: tmp_path / run.name)
    monkeypatch.setattr(reproduction, "choose_evaluation_set", lambda entry, evaluation_set: evaluation_set)
    (play,) = run.config.callbacks_on_train_result
    play(algorithm=algorithm, result={})
    assert not played
    algorithm.iteration = 10
    play(algorithm=algorithm, result={})
    assert played == [(20, "generated")]
    written = json.loads(evaluation_file(tmp_path / run.name, run.sets[0], 10).read_text())
    assert written["labels"] == {"method": "trial", "backbone": "B", "seed": 1, "iteration": 10}


def test_finished_runs_become_a_table_and_figures_without_ray(scale, tmp_path, capsys, monkeypatch):
    sweep, out = plan("table3", scale), tmp_path / "out"
    out.mkdir()
    Sweep(sweep, out).begin()
    for name, run in sweep.runs.items():
        finish(sweep, name, out, {"grpo": 0.2, "trial": 0.8}.get(run.method, 0.5))
    trials = [TrialRecord(name, run.parameters, "done", 10, 0.5, 9.0) for name, run in sweep.runs.items()]
    SweepResult(sweep.metric, "max", trials, 2).save(out)
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    assert run_cli("reproduce", "table3", "--scale", scale, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "report:" in printed
    cells = pandas.read_csv(out / "table3.csv")
    found = cells[(cells["method"] == "grpo") & (cells["column"] == "Avg.")]["mean"].item()
    assert found == pytest.approx(sum(coin_flips(20, 0.2, seed).mean() for seed in (0, 1)) / 2)
    differences = pandas.read_csv(out / "table3_differences.csv")
    assert set(differences["reference"]) == {"grpo", "uniform", "permuted"}
    assert "TRIAL" in (out / "table3.tex").read_text()
    assert (out / "figures" / "alfworld-b" / "success.png").read_bytes().startswith(b"\x89PNG")
    # Another number of seeds is another sweep.
    (out / "sweep.json").unlink()
    assert run_cli("reproduce", "table3", "--scale", scale, "--out", out, "--seeds", 1) == 2


# To plan pretrained_tools copies a whole model.
@pytest.mark.parametrize("name", sorted({*scale_names()} - {"pretrained_tools"}))
def test_the_scales_that_come_along_are_valid(name):
    for study in STUDIES:
        assert len(plan(study, name, seeds=1).runs) >= 2


def test_the_paper_scale_is_the_papers_protocol():
    sweep = plan("table2", "paper", seeds=1)
    assert sweep.stop == {"training_iteration": 150}
    shared = {"tasks_per_iteration": 16, "group_size": 8, "lr": 1e-6, "max_response_tokens": 512, "gap_clip": 2.0}
    shared |= {"clamp_alpha": 1.0, "hindsight_start_iteration": 25}
    names = ("minibatch_rows", "microbatch_rows", "max_prompt_tokens", "hindsight_coeff")
    own = {"alfworld": (256, 32, 2048, 0.01, 50), "webshop": (64, 8, 4096, 0.005, 15)}
    for run in sweep.runs.values():
        if run.method == "trial":
            assert {name: getattr(run.config, name) for name in shared} == shared
            found = *(getattr(run.config, name) for name in names), run.config.env_config["max_turns"]
            assert found == own[run.environment]
    assert {each.split for run in sweep.runs.values() for each in run.sets} == {"valid_seen", "valid_unseen", "test"}


def run_cli(*arguments):
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def test_dry_run_starts_and_writes_nothing(scale, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_cli("reproduce", "table3", "--scale", scale, "--out", out, "--seeds", 1, "--dry-run") == 0
    assert capsys.readouterr().out.count("│ new") == 4
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table9", "--scale", "tiny"], "table9"),
        (["table3", "--scale", "huge"], "no scale 'huge'"),
        (["table3", "--scale", "empty.py"], "must define `scale`"),
    ],
)
def test_bad_input_exits_2(scale, arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("scale = 3")
    assert run_cli("reproduce", *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

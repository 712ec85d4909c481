"""A sweep with real trials: two seeds of one point at a time, their files, and what its best configuration gives."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from trial_ray import cli
from trial_ray.experiments.experiment import load_experiment
from trial_ray.experiments.sweep_result import SweepResult

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_session")]

SWEEP = """
from ray import tune
from trial_ray.algorithms import TRIALConfig
config = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"difficulty": "tiny", "num_games": 8, "max_turns": 2, "split": "generated"})
    .policy(model_path=MODEL)
    .training(group_size=2, tasks_per_iteration=1, kl_coeff=0.0, hindsight_start_iteration=1)
    .rollouts(max_prompt_tokens=400, max_response_tokens=4, prompt_style="plain")
    .engines(engine="transformers", num_cpus_per_engine=0.25)
    .env_runners(num_env_runners=0, num_cpus_per_env_runner=0.25)
    .learners(num_learners=0, num_cpus_per_learner=0.25)
    .resources(num_cpus_for_main_process=0.25)
    .debugging(seed=tune.grid_search([0, 1]))
)
metric = "learners/default_policy/grpo/entropy"
"""


def sweep(folder, text, *arguments) -> int:
    file = folder / "sweep.py"
    file.write_text(text)
    return cli.main(["sweep", str(file), "--out", str(folder / "out"), *arguments])


def test_a_sweep_leaves_tables_pictures_and_a_file_to_train(model_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trial_ray.experiments.ray_session.ray_session", lambda verbose: nullcontext())
    text = SWEEP.replace("MODEL", repr(model_path))
    assert sweep(tmp_path, text + "stop = {'training_iteration': 1}") == 0
    printed = capsys.readouterr().out
    assert "2 trials, 2 at a time: each takes 0.5 of 2 CPUs" in printed
    assert "(n=2)" in printed
    result = SweepResult.load(tmp_path / "out")
    assert [trial.status for trial in result.trials] == ["done", "done"]
    (point,) = result.points()
    assert point.half_width > 0  # the seeds gave different weights, tasks and responses
    assert list(result.dataframe()["seed"]) == [trial.parameters["seed"] for trial in result.trials]
    best = load_experiment(tmp_path / "out" / "best.py")
    assert best.config.seed == result.best().parameters["seed"]
    assert best.config.model_path == model_path
    for trial in (tmp_path / "out").glob("TRIAL_*"):
        assert list(trial.glob("events.out.tfevents.*"))
        assert list(trial.glob("checkpoint_*/rllib_checkpoint.json"))

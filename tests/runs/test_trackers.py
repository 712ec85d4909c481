"""Trackers log runs through the services' own libraries, offline and without secrets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cli_fakes import noting_tracker

from trial_ray import cli
from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.runs import trackers
from trial_ray.runs.trackers import TrackedRun, Trackers, identifier, require_trackers
from trial_ray.sweeps.callbacks import TrialFolders

SETTINGS = {"settings": {"lr": 0.5, "engine_kwargs": {"hf_token": "t0p", "max_prompt_tokens": 7}}}


@pytest.fixture
def services(monkeypatch, tmp_path):
    """Let the services store runs below ``tmp_path``, and return it."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    # Creating MLflow's database would take 10 s.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path


def log_two_runs(name, folder):
    """Log two runs at the same time, and continue the first."""
    first, second = (TrackedRun(f"run-{key}", key, SETTINGS, folder, "sweep") for key in ("one", "two"))
    warnings: list[str] = []
    open_runs = [Trackers([name], run, warnings.append) for run in (first, second)]
    for iteration in (1, 2):
        for run in open_runs:
            run.log(iteration, {"env_runners/success_rate": 0.1 * iteration, "timestamp": 5})
    open_runs[0].close("interrupted")
    open_runs[1].close("failed")
    again = Trackers([name], TrackedRun("run-one", "one", SETTINGS, folder, "sweep", resumed=True), warnings.append)
    again.log(3, {"env_runners/success_rate": 0.9})
    again.close("done")
    assert not warnings


def test_wandb_keeps_runs_offline(services):
    log_two_runs("wandb", services)
    files = list(services.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 3
    kept = b"".join(file.read_bytes() for file in files)
    assert b"env_runners/success_rate" in kept
    assert b"t0p" not in kept
    assert not [*services.glob("wandb/*/files/requirements.txt"), *services.glob("wandb/*/files/wandb-metadata.json")]


def test_mlflow_keeps_runs_in_its_store(services):
    from mlflow.tracking import MlflowClient

    log_two_runs("mlflow", services)
    client = MlflowClient()
    runs = {
        run.info.run_name: run for run in client.search_runs([client.get_experiment_by_name("trial-ray").experiment_id])
    }
    assert {name: run.info.status for name, run in runs.items()} == {"run-one": "FINISHED", "run-two": "FAILED"}
    history = client.get_metric_history(runs["run-one"].info.run_id, "env_runners/success_rate")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    params = runs["run-two"].data.params
    assert params["settings.lr"] == "0.5"
    assert params["settings.engine_kwargs.hf_token"] == "<hidden>"


class Fails:
    def __init__(self, run):
        if run.key == "refused":
            raise ConnectionError("no route\nto host")

    def log(self, iteration, metrics):
        raise ConnectionError("no route\nto host")


def test_a_failing_service_is_dropped(monkeypatch, tmp_path):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Fails)
    warnings: list[str] = []
    run = Trackers(["wandb"], TrackedRun("a", "a", {}, tmp_path), warnings.append)
    run.log(1, {})
    run.log(2, {})
    run.close("done")
    assert len(warnings) == 1
    assert warnings[0].endswith("ConnectionError: no route")
    with pytest.raises(UserInputError, match="no route"):
        Trackers(["wandb"], TrackedRun("a", "refused", {}, tmp_path), warnings.append)


def test_a_missing_library_is_an_error_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for command in ("train", "sweep"):
        assert cli.main([command, "alfworld_quickstart", "--log-to", "wandb", "--out", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingDependencyError, match="wandb=="):
        require_trackers(["wandb"])


def test_trials_of_a_sweep_are_runs_of_one_group(monkeypatch, tmp_path):
    from ray import cloudpickle

    from trial_ray.algorithms import TRIAL, TRIALConfig

    calls = []

    monkeypatch.setitem(trackers.TRACKERS, "wandb", noting_tracker(calls))
    config = TRIALConfig().training(lr=0.25).to_dict()
    a, b = (
        SimpleNamespace(
            trial_id=name,
            custom_trial_name=None,
            config=config,
            path=str(tmp_path / name),
            get_trainable_cls=lambda: TRIAL,
            latest_checkpoint_result=None,
        )
        for name in "ab"
    )
    callback = TrialFolders(["sweep"], ["wandb"], "sweep")
    for trial in (a, b):
        callback.on_trial_start(0, [a, b], trial)
        callback.on_trial_result(0, [a, b], trial, {"training_iteration": 1, "config": config})
    callback.on_trial_complete(0, [a, b], a)
    restored = cloudpickle.loads(cloudpickle.dumps(TrialFolders(["sweep"], ["wandb"], "sweep")))
    callback.on_experiment_end([a, b])
    for iteration in (1, 2):
        (tmp_path / f"b/trajectories/iteration={iteration:05d}").mkdir(parents=True)
    b.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 1})
    restored.on_trial_start(0, [a, b], b)
    # Iterations after the checkpoint are repeated.
    assert [path.name for path in (tmp_path / "b/trajectories").iterdir()] == ["iteration=00001"]
    assert calls[:2] == [("sweep-a", "sweep", False, 0.25), ("sweep-a", 1, 1.0)]
    assert calls[4:] == [("sweep-a", "done"), ("sweep-b", "interrupted"), ("sweep-b", "sweep", True, 0.25)]


def test_identifiers_have_only_accepted_characters():
    assert identifier("runs/a b:2026+01") == "runs-a-b-2026-01"

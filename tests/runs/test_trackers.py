"""Trackers log runs through a service's own library, offline and without secrets."""

from types import SimpleNamespace

import pytest
from cli_fakes import names, noting_tracker
from ray import cloudpickle

from trial_ray import TRIAL, TRIALConfig, cli
from trial_ray.errors import MissingDependencyError, UserInputError
from trial_ray.runs.trackers import TRACKERS, TrackedRun, Trackers, identifier, require_trackers
from trial_ray.sweeps.callbacks import TrialCallback

SETTINGS = {"settings": {"lr": 0.5, "engine_kwargs": {"hf_token": "t0p", "max_prompt_tokens": 7}}}


def test_mlflow_keeps_runs_in_its_store(monkeypatch, tmp_path):
    """Two runs are logged at the same time, and the first is continued."""
    from mlflow.tracking import MlflowClient  # it takes seconds

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    # Creating MLflow's database would take 10 s.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    warnings = []

    def tracked(key, resumed=False):
        return Trackers(["mlflow"], TrackedRun(key, key, SETTINGS, tmp_path, "sweep", resumed), warnings.append)

    one = tracked("one")
    two = tracked("two")
    for iteration in (1, 2):
        for run in (one, two):
            run.log(iteration, {"env_runners/success_rate": 0.1 * iteration, "timestamp": 5})
    one.close("interrupted")
    two.close("failed")
    again = tracked("one", resumed=True)
    again.log(3, {"env_runners/success_rate": 0.9})
    again.close("done")
    assert not warnings
    client = MlflowClient()
    experiment = client.get_experiment_by_name("trial-ray").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert {name: run.info.status for name, run in runs.items()} == {"one": "FINISHED", "two": "FAILED"}
    history = client.get_metric_history(runs["one"].info.run_id, "env_runners/success_rate")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    params = runs["two"].data.params
    assert params["settings.lr"] == "0.5"
    assert params["settings.engine_kwargs.hf_token"] == "<hidden>"


class Fails:
    def __init__(self, run):
        if run.key == "refused":
            self.log(0, {})

    def log(self, iteration, metrics):
        raise ConnectionError("no route\nto host")


def test_a_failing_service_is_dropped(monkeypatch, tmp_path):
    monkeypatch.setitem(TRACKERS, "wandb", Fails)
    warnings = []
    run = Trackers(["wandb"], TrackedRun("a", "a", {}, tmp_path), warnings.append)
    run.log(1, {})
    run.log(2, {})
    run.close("done")
    (warning,) = warnings
    assert warning.endswith("ConnectionError: no route")
    with pytest.raises(UserInputError, match="no route"):
        Trackers(["wandb"], TrackedRun("a", "refused", {}, tmp_path), warnings.append)


def test_a_missing_library_is_an_error_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("trial_ray.runs.trackers.find_spec", lambda name: None)
    for command in ("train", "sweep"):
        assert cli.main(f"{command} alfworld_quickstart --log-to wandb --out {tmp_path}/run".split()) == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(MissingDependencyError, match="wandb=="):
        require_trackers(["wandb"])


def test_trials_of_a_sweep_are_runs_of_one_group(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(TRACKERS, "wandb", noting_tracker(calls))
    trial = SimpleNamespace(
        trial_id="a",
        custom_trial_name=None,
        config=TRIALConfig().training(lr=0.25).to_dict(),
        path=str(tmp_path),
        get_trainable_cls=lambda: TRIAL,
        latest_checkpoint_result=None,
    )
    callback = TrialCallback(["sweep"], ["wandb"], "sweep", kept=None)
    callback.on_trial_start(0, [], trial)
    callback.on_trial_result(0, [], trial, {"training_iteration": 1, "config": trial.config})
    restored = cloudpickle.loads(cloudpickle.dumps(callback))
    callback.on_trial_complete(0, [], trial)
    callback.on_trial_start(0, [], trial)
    callback.on_experiment_end([])
    for iteration in (1, 2):
        (tmp_path / f"trajectories/iteration={iteration:05d}").mkdir()
    trial.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 1})
    restored.on_trial_start(0, [], trial)
    # Iterations after the checkpoint are repeated.
    assert names(tmp_path / "trajectories") == ["iteration=00001"]
    ends = [("sweep-a", 1, 1.0), ("sweep-a", "done"), ("sweep-a", "interrupted")]
    starts = [("sweep-a", "sweep", resumed, 0.25) for resumed in (False, False, True)]
    assert calls == [starts[0], *ends[:2], starts[1], ends[2], starts[2]]


def test_identifiers_have_only_accepted_characters():
    assert identifier("runs/a b:2026+01") == "runs-a-b-2026-01"

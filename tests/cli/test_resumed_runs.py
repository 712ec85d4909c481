"""Runs that are continued: one command at a time, the settings of each iteration, and records that are dropped or kept."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm, iterations, names, read

from trial_ray import EnvironmentAdapter, cli
from trial_ray.cli.evaluate import checkpoint_config
from trial_ray.errors import CheckpointError, UserInputError
from trial_ray.files import write_text
from trial_ray.reports.groups import group_runs
from trial_ray.runs.checkpoints import MODEL_INSIDE_CHECKPOINT
from trial_ray.runs.config_record import load_record
from trial_ray.runs.locks import LOCK_FILE, folder_lock
from trial_ray.runs.reader import RecordedRun

ALFWORLD = "trial/ALFWorld-v0"


def contents(folder):
    """Return the content of every file except logs, to which a refused command may add."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts}


def refused(train, *arguments, **fake):
    """Require that a resume exits with 2 and changes nothing."""
    before = contents(train.out)
    train.resume(*arguments, code=2, **fake)
    assert contents(train.out) == before


# -- one command at a time ---------------------------------------------------------------------------------------------


HOLDER = """
import os, sys, time
from pathlib import Path
from trial_ray.runs.locks import folder_lock
with folder_lock(Path(sys.argv[1]), ["trial-ray", "train", "api_key=sk-secret"]):
    if os.fork() == 0:  # the fork prints its id after it has released its copy of the lock
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_lock_of_a_killed_command_does_not_outlive_it(train, capsys):
    train(1)
    with subprocess.Popen([sys.executable, "-c", HOLDER, train.out], stdout=subprocess.PIPE, text=True) as holder:
        try:
            forked = int(holder.stdout.readline())
            refused(train, 2)
            assert cli.main(f"report {train.out}".split()) == 0
            error = capsys.readouterr().err
            assert f"in use by process {holder.pid} on" in error
            assert "sk-secret" not in error
        finally:
            holder.kill()
            holder.wait(timeout=30)
    try:
        train.resume(2)
        assert iterations(train.out) == [1, 2]
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_locked_folder_is_refused(command, tmp_path, monkeypatch):
    out = tmp_path / "out"
    # Two new sweeps may both have found the folder empty.
    monkeypatch.setattr("trial_ray.sweeps.run.Sweep.require_folder", lambda *_, **__: None)
    monkeypatch.setattr("trial_ray.algorithms.startup.require_inputs", lambda config: None)
    with folder_lock(out, ["trial-ray", "other"]):
        assert cli.main(f"{command} sweeps/lambda_alpha --out {out}".split()) == 2
        assert names(out) == [LOCK_FILE]
    assert not out.exists()


def test_folder_that_cannot_be_locked(tmp_path, monkeypatch, caplog):
    (file := tmp_path / "file").touch()
    with pytest.raises(UserInputError), folder_lock(file, []):
        pass
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with folder_lock(tmp_path / "new", []):
        assert "has no locks" in caplog.text


# -- the settings of each iteration ------------------------------------------------------------------------------------


KEEP = "--checkpoint-every 1 --keep-checkpoints 9"
LATER = "--set lr=1e-3 --set max_prompt_tokens=700 --set hindsight_start_iteration=2"


@pytest.fixture
def changed(train):
    """Iterations 1 and 2 with one rate and prompt limit, 3 and 4 with others; all checkpoints are kept."""
    train(2, "--set lr=1e-4", KEEP)
    train.resume(4, LATER, KEEP)
    for checkpoint in (train.out / "checkpoints").iterdir():
        for name in ("config.json", "model.safetensors"):
            write_text(checkpoint / MODEL_INSIDE_CHECKPOINT / name, "{}")
        (checkpoint / "manifest.json").unlink()
    return train


def test_checkpoint_is_evaluated_with_the_settings_of_its_iteration(changed):
    def prompt_limit(checkpoint, adapters=()):
        path = f"{changed.out}/{checkpoint}"
        return checkpoint_config(path, ALFWORLD, "valid_seen", [], adapters)[0].max_prompt_tokens

    first = prompt_limit("checkpoints/000001")
    assert first == prompt_limit("checkpoints/000002") != 700
    assert prompt_limit("checkpoints/000003") == prompt_limit(".") == 700
    # The run has the config's default, which an adapter would replace in a new config.
    own = EnvironmentAdapter(ALFWORLD, defaults={"max_prompt_tokens": 777})
    assert prompt_limit("checkpoints/000001", [own]) == first


def test_environment_and_split_of_an_evaluation_are_the_runs(changed):
    out = str(changed.out)
    for split in ("train", None):
        config, labels = checkpoint_config(out, None, split, [])
        assert labels["method"] == "trial"
        assert config.env == ALFWORLD
        assert config.env_config["split"] == (split or "valid_seen")
    assert checkpoint_config(out, None, None, ["model_path=package:alfworld-tiny"])[1] == {}
    config, _ = checkpoint_config("oracle", ALFWORLD, "generated", ['env_config={"difficulty": "tiny"}'])
    assert config.env_config == {"split": "generated", "difficulty": "tiny"}
    for env, split, option in ((None, "valid_seen", "--env"), (ALFWORLD, None, "--split")):
        with pytest.raises(UserInputError, match=option):
            checkpoint_config("oracle", env, split, [])


def test_report_names_changed_settings_and_keeps_the_run_apart(changed, tmp_path):
    run = RecordedRun(changed.out)
    first, second, third = run.config.changes
    assert [first.name, second.name, third.name] == ["hindsight_start_iteration", "lr", "max_prompt_tokens"]
    assert first.iteration == second.iteration == third.iteration == 3
    assert second.before == 1e-4
    assert second.after == 1e-3
    # Another run, whose settings are those of the last iterations, is not a second seed of this run.
    changed("--out", tmp_path / "other", "--seed 1", LATER)
    assert len(group_runs([run, RecordedRun(tmp_path / "other")])) == 2
    # A command without an iteration changes no settings of the run.
    changed.resume(4, "--set lr=0.5 --trust")
    run = RecordedRun(changed.out)
    assert run.config.settings["lr"] == 1e-3
    assert [change.after for change in run.config.changes if (change.iteration, change.name) == (5, "lr")] == [0.5]


def test_settings_of_repeated_iterations_are_replaced(train, capsys):
    train(2, "--set lr=0.1", KEEP)
    train.resume(4, "--set lr=0.2", KEEP)
    assert "changed: lr is 0.2, it was 0.1" in capsys.readouterr().out
    for number in (2, 3, 4):
        shutil.rmtree(train.out / f"checkpoints/00000{number}")
    train.resume(3, "--set lr=0.3")
    path = train.out / "resolved_config.json"
    assert [load_record(path, iteration=number).lr for number in (0, 1, 2, 3, None)] == [0.1, 0.1, 0.3, 0.3, 0.3]


METHOD = (
    "from trial_ray.algorithms import GRPOConfig\n\n\nclass MyConfig(GRPOConfig):\n    pass\n\n\nCONFIG = MyConfig\n"
)


def test_run_continues_with_its_own_method_only(train, tmp_path, capsys):
    old, new = (tmp_path / f"{folder}/mine.py" for folder in ("old", "new"))
    for file in (old, new):
        write_text(file, METHOD)
    train(1, "--method", old)
    old.unlink()
    train.resume(2, "--method", new)
    assert iterations(train.out) == [1, 2]
    train.resume("--method grpo --iterations 3", code=2)
    assert "mine.py" in capsys.readouterr().err


# -- what a resume drops, and what it refuses --------------------------------------------------------------------------


def test_finished_run_has_nothing_left_to_train(train, capsys):
    train(2)
    before = contents(train.out)
    train.resume(2, build_error=AssertionError("Ray's actors were started"))
    assert "--iterations N continues" in capsys.readouterr().out
    changes = {path.name for path, content in contents(train.out).items() if before.get(path) != content}
    assert changes <= {"report.html", "run.json"}
    train.resume(2, "--set evaluation_num_tasks=3")
    assert "evaluation_num_tasks" in str(read(train.out / "resolved_config.json"))
    # A criterion of `stop` that an earlier command reached is not trained beyond.
    train.file.write_text(EXPERIMENT + "stop = {'training_iteration': 9, 'env_runners/success_rate': 0.2}")
    train.resume(3)
    assert "raise or remove env_runners/success_rate" in capsys.readouterr().out
    assert iterations(train.out) == [1, 2]


def test_run_killed_before_its_first_checkpoint_starts_again(train):
    with pytest.raises(SystemExit):  # which leaves no record
        train(on_train=lambda iteration: iteration == 3 and sys.exit(9))
    assert iterations(train.out) == [1, 2]
    train.resume()
    assert iterations(train.out) == [1, 2, 3]
    refused(train, 9, build_error=CheckpointError("no such model"))
    # A run whose checkpoints are gone does not start again.
    shutil.rmtree(train.out / "checkpoints")
    refused(train)


def test_evaluations_after_the_checkpoint_are_dropped(train):
    train(2, KEEP)
    train.resume(4, KEEP)
    evaluations = train.out / "evaluations"
    shutil.copy(evaluations / "after_000004.json", evaluations / "valid_unseen-full_000004.json")
    shutil.rmtree(train.out / "checkpoints/000004")
    seen = []
    train.resume(4, on_train=lambda _: seen.append((names(evaluations), (train.out / "summary.json").exists())))
    assert seen == [(["after_000002.json", "before.json"], False)]


# -- a failed measurement ends no run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["{", '{"schema": "trial_ray/cost", "schema_version": 1, "parts": [{"wall_seconds": 0}]}']
)
def test_unreadable_cost_file_is_set_aside(train, content):
    train(1)
    file = train.out / "cost.json"
    file.write_text(content)
    train.resume(2)
    (aside,) = train.out.glob("cost.json.unreadable-*")
    assert aside.read_text() == content
    assert read(file)["iterations"] == 1


def test_failed_measurements_are_recorded_as_missing(train, monkeypatch):
    measure = Mock(side_effect=RuntimeError("no such counter\nand more"))
    monkeypatch.setattr(FakeAlgorithm, "matmul_rate", measure)
    monkeypatch.setattr(FakeAlgorithm, "actor_reports", measure)
    train()
    cost = read(train.out / "cost.json")
    assert cost["model_flops_utilisation"] is None
    assert cost["peak_memory_bytes"] == {}

"""Runs that are continued: one command at a time, the settings of each iteration, and figures over all parts."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm, interrupting, iterations, read

from trial_ray import cli
from trial_ray.adapters import EnvironmentAdapter
from trial_ray.cli.checkpoint_config import checkpoint_config
from trial_ray.errors import CheckpointError, FolderInUseError, UserInputError
from trial_ray.reports.groups import group_runs
from trial_ray.runs.checkpoints import MODEL_INSIDE_CHECKPOINT
from trial_ray.runs.config_record import load_record
from trial_ray.runs.locks import LOCK_FILE, folder_lock
from trial_ray.runs.reader import RecordedRun


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file but the log, to which a refused command may add."""
    files = (path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- one command at a time ---------------------------------------------------------------------------------------------


def test_a_second_command_on_a_run_is_refused_and_changes_nothing(train, capsys):
    found = []

    def begin_another(iteration):
        if iteration == 3 and not found:
            found.append(None)  # the nested command would come here, too
            before = contents(train.out)
            codes = [cli.main(["train", str(train.file), "--resume", str(train.out)])]
            codes += [cli.main(["report", str(train.out), "--out", str(train.out.with_name("now.html"))])]
            found[0] = codes, before == contents(train.out)

    train("--checkpoint-every", 1, on_train=begin_another)
    assert found == [([2, 0], True)]
    error = capsys.readouterr().err
    assert f"in use by process {os.getpid()} on {os.uname().nodename}" in error
    assert iterations(train.out) == [1, 2, 3]
    assert read(train.out / "run.json")["state"] == "done"
    train.resume(4)


HOLDER = """
import os, sys, time
from pathlib import Path
from trial_ray.runs.locks import folder_lock
with folder_lock(Path(sys.argv[1]), ["trial-ray", "train", "api_key=sk-secret"]):
    if os.fork() == 0:  # the fork says so itself, when it has let go of the lock
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_killed_command_leaves_nothing_that_keeps_others_out(train, capsys):
    train(1)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, train.out], stdout=subprocess.PIPE, text=True)
    try:
        forked = int(holder.stdout.readline())
        train.resume(2, code=2)
        error = capsys.readouterr().err
        assert f"in use by process {holder.pid} on" in error
        assert "sk-secret" not in error
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        holder.stdout.close()
    try:
        train.resume(2)
        assert iterations(train.out) == [1, 2]
    finally:
        os.kill(forked, signal.SIGKILL)


SWEEP = EXPERIMENT + "from ray import tune\nconfig.training(lr=tune.grid_search([0.1, 0.2]))\n"


def test_the_folder_of_many_runs_is_written_by_one_command(tmp_path, capsys, monkeypatch):
    file, out = tmp_path / "sweep.py", tmp_path / "out"
    file.write_text(SWEEP)
    with folder_lock(out, ["trial-ray", "other"]):
        assert cli.main(["train", str(file), "--out", str(out)]) == 2
    assert f"in use by process {os.getpid()} on" in capsys.readouterr().err
    # Both of two new sweeps may have found the folder empty.
    monkeypatch.setattr("trial_ray.sweeps.tuner.Sweep.require_folder", lambda *_, **__: None)
    monkeypatch.setattr("trial_ray.algorithms.startup.require_inputs", lambda config: None)
    with folder_lock(out, ["trial-ray", "other"]):
        assert cli.main(["sweep", str(file), "--out", str(out)]) == 2
        assert [path.name for path in out.iterdir()] == [LOCK_FILE]
    assert f"in use by process {os.getpid()} on" in capsys.readouterr().err
    assert not out.exists()


def test_a_lock_is_taken_by_one_of_many(tmp_path):
    """Also while its holders come and go, each of which removes the file."""
    inside, most = [0], [0]

    def hold():
        for _ in range(200):
            try:
                with folder_lock(tmp_path, []):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
            except FolderInUseError:
                continue

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_locked(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match="cannot be written"), folder_lock(tmp_path / "file", []):
        pass

    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unknown)
    with folder_lock(tmp_path / "new", []):
        assert "has no locks" in caplog.text


# -- the settings of each iteration ------------------------------------------------------------------------------------


@pytest.fixture
def changed(train):
    """Iterations 1 and 2 with one rate and view of the prompt, 3 and 4 with others; all checkpoints are kept."""
    keep = ["--checkpoint-every", 1, "--keep-checkpoints", 9]
    train(2, "--set", "lr=1e-4", *keep)
    settings = ["--set", "lr=1e-3", "--set", "max_prompt_tokens=700", "--set", "hindsight_start_iteration=2"]
    train.resume(4, *settings, *keep)
    for checkpoint in (train.out / "checkpoints").iterdir():
        (checkpoint / MODEL_INSIDE_CHECKPOINT).mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (checkpoint / MODEL_INSIDE_CHECKPOINT / name).write_text("{}")
        (checkpoint / "manifest.json").unlink()
    return train


def test_a_resume_says_what_differs(train, capsys):
    train(1, "--set", "lr=1e-4")
    train.resume(2, "--set", "lr=1e-3")
    assert "changed: lr is 0.001, it was 0.0001" in capsys.readouterr().out


def test_the_resume_of_a_finished_run_says_that_nothing_is_left(train, capsys):
    train(2)
    assert "nothing to train" not in capsys.readouterr().out
    before = contents(train.out)
    train.resume(2, build_error=AssertionError("Ray's actors were started"))
    assert "nothing to train: `stop` was reached after iteration 2; --iterations N continues" in capsys.readouterr().out
    assert iterations(train.out) == [1, 2]
    kept = {name for name, content in contents(train.out).items() if before.get(name) != content}
    assert kept <= {"report.html", "run.json"}
    train.resume(2, "--set", "evaluation_num_tasks=3")
    assert "evaluation_num_tasks" in str(read(train.out / "resolved_config.json"))
    train.file.write_text(train.file.read_text() + "stop['env_runners/success_rate'] = 0.1\n")
    train.resume(3)
    assert "to continue, raise or remove env_runners/success_rate in `stop`" in capsys.readouterr().out


def test_a_checkpoint_is_evaluated_with_the_settings_that_it_was_trained_with(changed):
    limits = {
        name: checkpoint_config(str(changed.out / name), "trial/ALFWorld-v0", "valid_seen", [])[0].max_prompt_tokens
        for name in ("checkpoints/000001", "checkpoints/000002", "checkpoints/000003", ".")
    }
    first = limits["checkpoints/000001"]
    assert first != 700
    assert list(limits.values()) == [first, first, 700, 700]
    # What the run has is the config's default, which an adapter would replace in a new config.
    own = EnvironmentAdapter("trial/ALFWorld-v0", defaults={"max_prompt_tokens": 777})
    run = str(changed.out / "checkpoints/000001")
    assert checkpoint_config(run, "trial/ALFWorld-v0", "valid_seen", [], [own])[0].max_prompt_tokens == first


def test_environment_and_split_of_an_evaluation_are_the_runs_unless_named(changed):
    for split, played in (("train", "train"), (None, "valid_seen")):
        config, labels = checkpoint_config(str(changed.out), None, split, [])
        assert labels["method"] == "trial"
        assert checkpoint_config(str(changed.out), None, split, ["model_path=package:alfworld-tiny"])[1] == {}
        assert (config.env, config.env_config["split"]) == ("trial/ALFWorld-v0", played)
    config, _ = checkpoint_config("oracle", "trial/ALFWorld-v0", "generated", ['env_config={"difficulty": "tiny"}'])
    assert config.env_config == {"split": "generated", "difficulty": "tiny"}
    for env, split, option in ((None, "valid_seen", "--env ID"), ("trial/ALFWorld-v0", None, "--split NAME")):
        with pytest.raises(UserInputError, match=option):
            checkpoint_config("oracle", env, split, [])


def test_a_report_names_what_changed_and_keeps_the_run_apart_from_others(changed, tmp_path):
    run = RecordedRun(changed.out)
    assert [(each.iteration, each.name, each.before, each.after) for each in run.config.changes] == [
        (3, "hindsight_start_iteration", 1, 2),
        (3, "lr", 1e-4, 1e-3),
        (3, "max_prompt_tokens", run.config.changes[2].before, 700),
    ]
    assert run.config.settings["lr"] == 1e-3
    # Another run whose last part had the same settings is no second seed of it.
    other = ["--set", "lr=1e-3", "--set", "max_prompt_tokens=700", "--set", "hindsight_start_iteration=2"]
    changed("--out", tmp_path / "other", "--seed", 1, *other)
    assert len(group_runs([run, RecordedRun(tmp_path / "other")])) == 2


def test_a_command_that_made_no_iteration_changes_no_settings_of_the_run(changed):
    changed.resume(4, "--set", "lr=0.5", "--trust")
    run = RecordedRun(changed.out)
    assert run.config.settings["lr"] == 1e-3
    assert [each.after for each in run.config.changes if (each.iteration, each.name) == (5, "lr")] == [0.5]


def test_settings_of_iterations_that_were_made_again_are_replaced(train):
    train(2, "--set", "lr=0.1", "--checkpoint-every", 1)
    train.resume(4, "--set", "lr=0.2", "--checkpoint-every", 1)
    for name in ("000003", "000004"):
        shutil.rmtree(train.out / "checkpoints" / name)
    shutil.copytree(train.out / "checkpoints", train.out / "kept")
    (train.out / "checkpoints" / "000001").mkdir()
    for name in ("rllib_checkpoint.json", "state.json"):
        (train.out / "checkpoints" / "000001" / name).write_text('{"iteration": 1}')
    train.resume(3, "--set", "lr=0.3", "--trust")
    path = train.out / "resolved_config.json"
    assert [load_record(path, iteration=each).lr for each in (0, 1, 2, 3, None)] == [0.1, 0.1, 0.3, 0.3, 0.3]


# -- what a resume drops, and what it refuses --------------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(train, capsys):
    train()
    shutil.rmtree(train.out / "checkpoints")
    before = contents(train.out)
    train.resume(code=2)
    assert "is gone from" in capsys.readouterr().err
    assert contents(train.out) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(train):
    def die(iteration):
        if iteration == 3:
            raise SystemExit(9)  # nothing is recorded of it

    with pytest.raises(SystemExit):
        train(on_train=die)
    assert iterations(train.out) == [1, 2]
    train.resume()
    assert iterations(train.out) == [1, 2, 3]


def test_evaluations_later_than_the_checkpoint_go(train):
    train(2, "--checkpoint-every", 1)
    train.resume(4, "--checkpoint-every", 1)
    evaluations = train.out / "evaluations"
    shutil.copy(evaluations / "after_000004.json", evaluations / "valid_unseen-full_000004.json")
    shutil.rmtree(train.out / "checkpoints" / "000004")
    seen = []

    def look(iteration):
        seen.append((sorted(path.stem for path in evaluations.iterdir()), (train.out / "summary.json").exists()))

    train.resume(4, on_train=look)
    assert seen == [(["after_000002", "before"], False)]


def test_a_resume_that_could_not_begin_leaves_the_run_as_it_was(train):
    train()
    before = contents(train.out)
    train.resume(9, build_error=CheckpointError("no such model"), code=2)
    assert contents(train.out) == before


# -- figures over all parts --------------------------------------------------------------------------------------------


def test_a_part_that_only_played_the_evaluation_set_has_its_cost(train):
    train(on_train=interrupting(3), code=130)
    train.resume()
    cost = read(train.out / "cost.json")
    assert [part["iterations"] for part in cost["parts"]] == [3, 0]
    assert cost["parts"][1]["seconds"]["evaluation"] > 0
    assert read(train.out / "summary.json")["seconds"] == cost["wall_seconds"]


def test_a_criterion_that_was_reached_stays_so(train):
    train.file.write_text(EXPERIMENT + "stop = {'training_iteration': 9, 'env_runners/success_rate': 0.2}")
    train()
    train.resume()
    assert iterations(train.out) == [1, 2]


# -- what only measures ends no run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", ["{", '{"schema": "trial_ray/cost", "schema_version": 1, "parts": [{"wall_seconds": 0}]}']
)
def test_a_cost_file_of_another_shape_is_set_aside(train, content):
    train(1)
    (train.out / "cost.json").write_text(content)
    train.resume(2)
    (aside,) = train.out.glob("cost.json.unreadable-*")
    assert aside.read_text() == content
    assert read(train.out / "cost.json")["iterations"] == 1
    assert iterations(train.out) == [1, 2]


def test_what_cannot_be_measured_is_not_measured(train, monkeypatch, capsys):
    def measure(*_):
        raise RuntimeError("no such counter\nand more")

    monkeypatch.setattr(FakeAlgorithm, "matmul_rate", measure)
    monkeypatch.setattr(FakeAlgorithm, "actor_reports", measure)
    train()
    cost = read(train.out / "cost.json")
    assert (cost["model_flops_utilisation"], cost["peak_memory_bytes"]) == (None, {})
    assert "RuntimeError: no such counter" in capsys.readouterr().out

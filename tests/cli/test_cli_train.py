"""The flow of ``trial-ray train``: run folder, metrics, evaluation, resume, interrupt, exit codes, error texts."""

import html
import logging
import os
import re
import subprocess
from types import SimpleNamespace

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm, interrupting, iterations, noting_tracker, read
from ray.exceptions import ActorDiedError

from trial_ray import cli
from trial_ray.errors import (
    CheckpointError,
    EngineError,
    EnvironmentFaultError,
    LearnerError,
    PolicyBrokenError,
    TrainingDivergedError,
)
from trial_ray.runs.trackers import TRACKERS


def state(folder):
    return read(folder / "run.json")["state"]


def test_a_run_leaves_everything_it_promises(train, capsys):
    train("--set", "lr=1e-4", "--seed", 7)
    summary = read(train.out / "summary.json")
    assert (summary["before"]["success_rate"], summary["after"]["success_rate"]) == (0.0, 0.6)
    assert summary["comparison"]["gained"] == 12
    assert summary["comparison"]["p_value"] == pytest.approx(2 / 2**12)
    assert (summary["method"], summary["seed"], summary["iterations"]) == ("trial", 7, 3)
    assert (train.out / summary["checkpoint"] / "state.json").exists()
    assert iterations(train.out) == [1, 2, 3]
    assert "broken" not in (train.out / "metrics.jsonl").read_text()
    assert list((train.out / "tensorboard").glob("events.*"))
    record = read(train.out / "resolved_config.json")
    assert record["settings"]["lr"] == 1e-4
    assert train.config.trajectories_folder == str(train.out / "trajectories")
    assert state(train.out) == "done"
    assert train.algorithm.stopped
    printed = capsys.readouterr().out
    for part in ("TRIAL", "16 tasks × 8 rollouts", "success 0.0%", "iteration 3/3", "(12/20)", "cost of 3", "+60.0%"):
        assert part in printed
    cost = read(train.out / "cost.json")
    assert (cost["iterations"], cost["tokens"]["trained"]) == (3, 300)
    assert sum(cost["seconds"].values()) == pytest.approx(cost["wall_seconds"])
    assert cost["peak_memory_bytes"]["driver"]["host"] == 1 << 30
    assert printed.rstrip().endswith(f"report: {train.out / 'report.html'}")
    assert "+60.0 [" in (train.out / "report.html").read_text()


def test_a_report_that_cannot_be_written_does_not_fail_the_run(train, capsys, monkeypatch):
    def fail(*arguments):
        raise OSError("No space left on device\nand more")

    monkeypatch.setattr("trial_ray.reports.report.write_text", fail)
    train()
    assert state(train.out) == "done"
    assert capsys.readouterr().out.splitlines()[-1] == "no report was written: No space left on device"


def outcome(folder):
    """What ``summary.json`` and the report say of success."""
    summary = read(folder / "summary.json")
    report = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", (folder / "report.html").read_text())).split())
    return summary, report


def evaluations(folder):
    return sorted(path.name for path in (folder / "evaluations").iterdir())


def test_a_evaluation_set_that_comes_later_was_not_played_before_training(train):
    train(1, tasks=0)
    train.resume(3)
    assert evaluations(train.out) == ["after_000003.json"]
    summary, report = outcome(train.out)
    assert (summary["before"], summary["after"]["success_rate"]) == (None, 0.6)
    assert summary["comparison"] == {"not_compared": "There was no evaluation before training."}
    assert "– –" in report


def test_another_evaluation_set_is_no_failure_and_not_compared_with_the_first_one(train, capsys):
    train(1)
    train.resume(3, tasks=10)
    assert state(train.out) == "done"
    summary, report = outcome(train.out)
    assert (summary["before"]["episodes"], summary["after"]["episodes"]) == (20, 10)
    assert "num_tasks is 20 before and 10 after" in summary["comparison"]["not_compared"]
    assert "different protocols" in report
    assert "will not be compared: " in capsys.readouterr().out


def test_an_evaluation_of_another_evaluation_set_is_not_taken_for_the_one_asked_for(train, capsys):
    train(3)
    first = (train.out / "evaluations" / "after_000003.json").read_bytes()
    train.resume(3, "--set", "evaluation_num_tasks=10", tasks=10)
    assert outcome(train.out)[0]["after"]["episodes"] == 10
    assert evaluations(train.out)[0] == "after_000003.json"
    (aside,) = (train.out / "evaluations").glob("after_000003.json.replaced-*")
    assert aside.read_bytes() == first
    assert f"set aside as {aside}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["before.json", "after_000003.json"])
def test_an_evaluation_that_cannot_be_read_does_not_end_the_run(name, train, capsys):
    train(3)
    (train.out / "evaluations" / name).write_text("{}")
    train.resume(3)
    summary, _ = outcome(train.out)
    assert summary["after"]["successes"] == 12
    assert bool(summary["before"]) == (name != "before.json")
    assert f"evaluations/{name}" in capsys.readouterr().out


def test_in_a_mixture_every_evaluation_set_is_compared_with_its_own_beginning(train):
    train(2, environments=("Shop", "Shop_2"))
    (train.out / "evaluations" / "before_Shop_2.json").unlink()
    train.resume(3, environments=("Shop", "Shop_2"))
    assert evaluations(train.out)[-1] == "before_Shop.json"
    summary, report = outcome(train.out)
    assert {name: found["successes"] for name, found in summary["after"].items()} == {"Shop": 12, "Shop_2": 12}
    assert list(summary["before"]) == ["Shop"]
    assert summary["comparison"]["Shop"]["gained"] == 12
    assert summary["comparison"]["Shop_2"] == {"not_compared": "There was no evaluation before training."}
    assert "(12/20), Shop_2: 60.0%" in report


def test_resume_with_another_method_is_refused(train, capsys):
    train(1)
    train.resume("--method", "grpo", "--iterations", 2, code=2)
    assert "--method trial" in capsys.readouterr().err


def test_a_run_of_a_method_whose_file_moved_is_continued(train, tmp_path):
    text = "from trial_ray.algorithms import GRPOConfig\n\n\nclass MyConfig(GRPOConfig):\n    pass\n\n\nCONFIG = MyConfig\n"
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
    train(1, "--method", tmp_path / "old/mine.py")
    (tmp_path / "old/mine.py").unlink()
    train.resume(2, "--method", tmp_path / "new/mine.py")
    assert iterations(train.out) == [1, 2]


def test_a_file_of_one_adapter_leaves_those_of_other_environments(tmp_path):
    from trial_ray import EnvironmentAdapter, GRPOConfig
    from trial_ray.cli.train import resolve_config

    file = tmp_path / "adapter.py"
    file.write_text(
        "from trial_ray import EnvironmentAdapter\nADAPTER = EnvironmentAdapter('mine/B-v0', max_turns=9)\n"
    )
    config = GRPOConfig().environment(adapter=[EnvironmentAdapter("mine/A-v0"), EnvironmentAdapter("mine/B-v0")])
    found = resolve_config(config, None, None, [], [file]).adapters
    assert [(each.env_id, each.max_turns) for each in found] == [("mine/A-v0", None), ("mine/B-v0", 9)]


def test_ctrl_c_finishes_the_iteration_saves_and_exits_130(train):
    train(5, on_train=interrupting(2), code=130)
    assert iterations(train.out) == [1, 2]
    assert [path.name for path in (train.out / "checkpoints").iterdir()] == ["000002"]
    assert state(train.out) == "interrupted"
    train.resume(3)
    assert iterations(train.out) == [1, 2, 3]


def test_what_libraries_write_goes_into_the_log_and_warnings_to_the_terminal(train, capfd):
    def chatter(iteration):
        os.write(2, b"core_worker.cc: from C++\n")
        subprocess.run(["echo", "from a child"], check=True)
        logging.getLogger("ray").warning("deprecated")
        logging.getLogger("trial_ray.algorithms.grpo").warning("iteration 1 trained nothing")

    train(1, on_train=chatter)
    log = (train.out / "logs" / "libraries.log").read_text()
    shown = "".join(capfd.readouterr())
    for part in ("from C++", "from a child"):
        assert part in log
        assert part not in shown
    assert "warning: iteration 1 trained nothing" in shown
    train.resume(2, "--verbose", on_train=chatter)
    assert (train.out / "logs" / "libraries.log").read_text() == log
    assert "from C++" in "".join(capfd.readouterr())


def test_checkpoints_come_as_often_and_as_many_are_kept_as_asked_for(train):
    train(5, "--checkpoint-every", 2, "--keep-checkpoints", 2)
    assert sorted(path.name for path in (train.out / "checkpoints").iterdir()) == ["000004", "000005"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EngineError("Engine 0 died."), "Engine 0 died."),
        (KeyError("x"), "KeyError: 'x' (--verbose shows the traceback)"),
    ],
)
def test_failure_while_running_exits_1_and_keeps_the_traceback(train, capsys, error, told):
    train("--set", "max_restarts=0", code=1, fail_at=2, error=error)
    assert capsys.readouterr().err.startswith(f"failed: {told}\n")
    assert type(error).__name__ in (train.out / "error.log").read_text()
    assert state(train.out) == "failed"
    assert iterations(train.out) == [1]
    assert read(train.out / "cost.json")["iterations"] == 1


def failing(*errors):
    """Raises one of the errors whenever the third iteration begins, until none is left."""
    left = list(errors)

    def on_train(iteration):
        if iteration == 3 and left:
            raise left.pop(0)

    return on_train


def test_a_run_goes_on_by_itself_from_its_newest_checkpoint(train, capsys):
    errors = [LearnerError("learner 0 died\nand more"), ActorDiedError()]
    train(4, "--checkpoint-every", 2, on_train=failing(*errors))
    assert iterations(train.out) == [1, 2, 3, 4]
    assert state(train.out) == "done"
    printed = capsys.readouterr().out
    told = f"restart 1 of at most 3: learner 0 died; continuing from {train.out / 'checkpoints' / '000002'}"
    assert told in printed
    assert "restart 2 of at most 3: The actor died" in printed
    first, second = sorted((train.out / "logs").glob("restart-*.log"))
    assert first.read_text().startswith(told + "\n")
    assert "LearnerError" in first.read_text()
    assert "ActorDiedError" in second.read_text()


def test_a_run_without_a_checkpoint_begins_again(train, capsys):
    train(on_train=failing(EngineError("Engine 0 died.")))
    assert "continuing from the initial weights" in capsys.readouterr().out
    assert iterations(train.out) == [1, 2, 3]


def test_a_run_is_restarted_only_so_often(train, capsys):
    errors = [EngineError(f"Engine {index} died.") for index in range(3)]
    train("--set", "max_restarts=2", on_train=failing(*errors), code=1)
    assert "failed: Engine 2 died." in capsys.readouterr().err
    assert "EngineError: Engine 2 died." in (train.out / "error.log").read_text()


@pytest.mark.parametrize(
    "error",
    [TrainingDivergedError("NaN"), EnvironmentFaultError("raised"), CheckpointError("no room"), RuntimeError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_again_is_not_tried_again(error, train, capsys):
    train(code=2 if isinstance(error, CheckpointError) else 1, on_train=failing(error))
    assert "restart" not in capsys.readouterr().out


def test_ctrl_c_in_the_last_iteration_skips_the_evaluation_set_after_it(train):
    train(on_train=interrupting(3), code=130)
    assert [path.name for path in (train.out / "evaluations").iterdir()] == ["before.json"]
    train.resume()
    assert (train.out / "evaluations" / "after_000003.json").exists()


def test_divergence_saves_the_state_aside_and_continues_from_the_last_good_checkpoint(train, capsys):
    failure = {"fail_at": 3, "error": TrainingDivergedError("Not finite.")}
    train("--checkpoint-every", 1, "--keep-checkpoints", 1, **failure, code=1)
    checkpoints = train.out / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["000002", "000002.stopped"]
    assert f"last checkpoint: {checkpoints / '000002'}; continue with --resume {train.out}" in capsys.readouterr().out


def test_weights_that_are_broken_are_not_saved(train):
    train(fail_at=3, error=PolicyBrokenError("Weights are not finite."), code=1)
    assert list((train.out / "checkpoints").iterdir()) == []


def test_no_checkpoint_is_written_while_a_guard_counts(train, monkeypatch):
    monkeypatch.setattr(FakeAlgorithm, "health_checks", SimpleNamespace(suspect=True))
    train("--checkpoint-every", 1)
    assert [path.name for path in (train.out / "checkpoints").iterdir()] == ["000003"]


def test_a_folder_in_use_is_refused(train, capsys):
    train.out.mkdir()
    (train.out / "mine.txt").write_text("keep")
    train(code=2)
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in train.out.iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_filled_and_never_replaced(train, monkeypatch):
    """It may be a mount point, or the one in which the command was started."""
    train.out.mkdir()
    monkeypatch.chdir(train.out)
    train("--out", ".", build_error=CheckpointError("some/model is no model folder."), code=2)
    assert os.listdir() == []
    train("--out", ".")
    assert state(train.out) == "done"
    assert os.path.samefile(".", train.out)
    assert not [name for name in os.listdir() if name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "hindsight_coef=0.1"], "Did you mean 'hindsight_coeff'?"),
        (["--set", "learning_rate=1e-4"], "It is 'lr' here."),
        (["--seed", "4294967296"], "seed is 4294967296, expected an int of at least 0"),
        (["--method", "trail"], "Did you mean 'trial'?"),
        (["--method", "nowhere.py"], "nowhere.py; give the path of a Python file that defines CONFIG"),
        (["--method", "rlsd"], "rescaling_iterations is 100, but training ends after iteration 3"),
        (["--resume", "/nonexistent"], "not a run folder"),
    ],
)
def test_bad_input_exits_2_says_why_and_writes_nothing(train, capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    train(*arguments, code=2)
    assert words in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("env_config.split=train", "ALFWorld's games were not found"),
        ("evaluation_num_tasks=100000", "Requested 100000 tasks, but split 'generated' of trial/ALFWorld-v0 has"),
        ("model_path=./nowhere", "there is no folder './nowhere'"),
        ("max_prompt_tokens=100000", "positions. Lower max_prompt_tokens"),
        ("engine_kwargs.max_bach=8", "max_bach"),
    ],
)
def test_inputs_that_are_not_there_are_named_before_ray_starts(
    changed, words, model_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    settings = ("warm_start=None", f"model_path={model_path}", "engine=transformers", changed)
    refuses("alfworld_quickstart", settings, tmp_path / "run", words, capsys)


def test_engine_arguments_are_checked_before_a_policy_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    refuses("own_environment", ("engine_kwargs.max_bach=8",), tmp_path / "run", "max_bach", capsys)


def refuses(experiment, settings, folder, words, capsys):
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert cli.main(["train", experiment, "--out", str(folder), *overrides]) == 2
    assert words in capsys.readouterr().err
    assert not folder.exists()


FEW_TASKS = """
import gymnasium
from trial_ray.algorithms import GRPOConfig

class Few(gymnasium.Env):
    def tasks(self, split):
        return ["one", "two", "three"]

gymnasium.register("mine/Few-v0", entry_point=Few)
config = GRPOConfig().environment("mine/Few-v0").rl_module(warm_start={"games": 2, "check_games": 1, "evaluation_games": 1})
stop = {"training_iteration": 1}
"""


@pytest.mark.parametrize(
    ("what", "source", "words"),
    [
        ("experiment", "stop = {}", "must define `config`"),
        ("experiment", "x = 1\nconfig = undefined_name", "line 2: NameError"),
        ("experiment", EXPERIMENT + "stop = {'training_iteration': 'many'}", "dict of finite numbers"),
        ("experiment", EXPERIMENT + "stop = {}", "--iterations"),
        (
            "experiment",
            EXPERIMENT + "stop = {'env_runners/succes_rate': 0.9}",
            "Did you mean 'env_runners/success_rate'",
        ),
        (
            "experiment",
            EXPERIMENT + "from ray import tune\nconfig = config.training(lr=tune.grid_search([0.1, 0.2]))",
            "searches over lr: use `trial-ray sweep`",
        ),
        ("experiment", FEW_TASKS, "mine/Few-v0 has 3 tasks, but the warm start needs 4 (games=2"),
        ("method", "x = 1", "must define CONFIG"),
    ],
)
def test_a_broken_file_is_the_users_error(train, tmp_path, capsys, what, source, words):
    file = tmp_path / "broken.py"
    (file if what == "method" else train.file).write_text(source)
    train(*(("--method", file) if what == "method" else ()), code=2)
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not train.out.exists()


@pytest.mark.parametrize("end", ["done", "failed", "interrupted"])
def test_a_service_is_told_of_every_iteration_and_how_the_run_ended(train, monkeypatch, end):
    calls = []

    monkeypatch.setitem(TRACKERS, "wandb", noting_tracker(calls))
    fakes = {
        "done": {},
        "failed": {"fail_at": 3, "error": EngineError("died"), "code": 1},
        "interrupted": {"on_train": interrupting(2), "code": 130},
    }
    train("--set", "lr=0.5", "--set", "max_restarts=0", "--log-to", "wandb", **fakes[end])
    assert calls[:3] == [("run", None, False, 0.5), ("run", 1, 1), ("run", 2, 2)]
    assert calls[-1] == ("run", end)
    assert len(calls) == (5 if end == "done" else 4)

"""The flow of ``trial-ray train``: run folder, evaluations, interrupts, restarts and exit codes."""

import logging
import os
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from cli_fakes import EXPERIMENT, FakeAlgorithm, failing, interrupting, iterations, names, noting_tracker, read
from ray.exceptions import ActorDiedError

from trial_ray import EnvironmentAdapter, GRPOConfig, cli
from trial_ray.cli.train import resolve_config
from trial_ray.errors import (
    CheckpointError,
    EngineError,
    EnvironmentFaultError,
    LearnerError,
    PolicyBrokenError,
    TrainingDivergedError,
)
from trial_ray.runs.trackers import TRACKERS


def state(train):
    return read(train.out / "run.json")["state"]


def test_run_folder_has_all_records(train, capsys):
    train("--set lr=1e-4 --seed 7")
    summary = read(train.out / "summary.json")
    assert summary["before"]["success_rate"] == 0.0
    assert summary["after"]["success_rate"] == 0.6
    assert summary["comparison"]["gained"] == 12
    assert summary["method"] == "trial"
    assert summary["seed"] == 7
    assert summary["iterations"] == 3
    assert (train.out / summary["checkpoint"] / "state.json").exists()
    assert iterations(train.out) == [1, 2, 3]
    assert "broken" not in (train.out / "metrics.jsonl").read_text()
    assert list(train.out.glob("tensorboard/events.*"))
    assert train.config.trajectories_folder == f"{train.out}/trajectories"
    assert train.algorithm.stopped
    assert "16 tasks × 8 rollouts" in capsys.readouterr().out
    cost = read(train.out / "cost.json")
    assert cost["iterations"] == 3
    assert cost["tokens"]["trained"] == 300
    assert cost["peak_memory_bytes"]["driver"]["host"] == 1 << 30
    assert "+60.0 [" in (train.out / "report.html").read_text()


def test_report_that_cannot_be_written_does_not_fail_the_run(train, capsys, monkeypatch):
    error = OSError("No space left on device\nand more")
    monkeypatch.setattr("trial_ray.reports.page.write_text", Mock(side_effect=error))
    train()
    assert state(train) == "done"
    assert "No space left on device" in capsys.readouterr().out.splitlines()[-1]


# -- evaluations -------------------------------------------------------------------------------------------------------


def test_another_evaluation_set_is_played_and_not_compared(train):
    train(1)
    train.resume(3, tasks=10)
    summary = read(train.out / "summary.json")
    file = train.out / "evaluations/after_000003.json"
    assert summary["before"]["episodes"] == 20
    assert summary["after"]["episodes"] == 10
    assert summary["comparison"].keys() == {"not_compared"}
    replaced = file.read_bytes()
    again = "--set evaluation_num_tasks=15"
    train.resume(3, again, tasks=15)
    (aside,) = file.parent.glob("after_000003.json.replaced-*")
    assert aside.read_bytes() == replaced
    # Neither does one that cannot be read end the run.
    file.write_text("{}")
    train.resume(3, again, tasks=15)
    assert read(train.out / "summary.json")["after"]["episodes"] == 15


def test_evaluation_sets_of_a_mixture_are_compared_apart(train):
    mixture = ("Shop", "Shop_2", "Home")
    train(2, environments=mixture)
    (train.out / "evaluations/before_Shop_2.json").unlink()
    (train.out / "evaluations/before_Home.json").write_text("{}")
    train.resume(3, environments=mixture)
    summary = read(train.out / "summary.json")
    assert [rates["successes"] for rates in summary["after"].values()] == [12, 12, 12]
    assert list(summary["before"]) == ["Shop"]
    compared, *others = summary["comparison"].values()
    assert compared["gained"] == 12
    assert [*map(list, others)] == [["not_compared"]] * 2


# -- interrupts, failures and restarts ---------------------------------------------------------------------------------


def test_ctrl_c_in_the_last_iteration_skips_the_evaluation(train):
    train(on_train=interrupting(3), code=130)
    assert names(train.out / "evaluations") == ["before.json"]
    train.resume()
    assert (train.out / "evaluations/after_000003.json").exists()
    cost = read(train.out / "cost.json")
    assert [part["iterations"] for part in cost["parts"]] == [3, 0]
    assert cost["parts"][1]["seconds"]["evaluation"] > 0
    assert read(train.out / "summary.json")["seconds"] == cost["wall_seconds"]


def test_output_of_libraries_goes_into_the_log(train, capfd):
    said = "from a child"

    def chatter(iteration):
        subprocess.run(["echo", said], check=True)
        logging.getLogger("trial_ray.algorithms.grpo").warning("iteration 1 trained nothing")

    train(1, on_train=chatter)
    file = train.out / "logs/libraries.log"
    log = file.read_text()
    printed = "".join(capfd.readouterr())
    assert said in log
    assert said not in printed
    assert "warning: iteration 1 trained nothing" in printed
    train.resume(2, "--verbose", on_train=chatter)
    assert file.read_text() == log
    assert said in "".join(capfd.readouterr())


def test_number_and_interval_of_checkpoints(train):
    train(5, "--checkpoint-every 2 --keep-checkpoints 2", tasks=0)
    assert names(train.out / "checkpoints") == ["000004", "000005"]
    assert read(train.out / "summary.json")["after"] is None


@pytest.mark.parametrize("error", [EngineError, KeyError])
def test_failure_exits_1_and_keeps_the_traceback(train, capsys, error):
    train("--set max_restarts=0", code=1, on_train=failing(error("x")))
    assert ("--verbose" in capsys.readouterr().err) == (error is KeyError)
    assert error.__name__ in (train.out / "error.log").read_text()
    assert read(train.out / "cost.json")["iterations"] == 2


@pytest.mark.parametrize(("options", "start"), [(("--checkpoint-every", 2), "000002"), ((), "the initial weights")])
def test_run_restarts_from_its_newest_checkpoint(train, options, start):
    train(4, *options, on_train=failing(LearnerError("learner 0 died\nand more"), ActorDiedError()))
    assert iterations(train.out) == [1, 2, 3, 4]
    assert state(train) == "done"
    first, second = (path.read_text() for path in sorted(train.out.glob("logs/restart-*.log")))
    assert start in first.splitlines()[0]
    assert "LearnerError" in first
    assert "ActorDiedError" in second


def test_number_of_restarts_is_limited(train):
    errors = (EngineError(f"Engine {index} died.") for index in range(3))
    train("--set max_restarts=2", on_train=failing(*errors), code=1)
    assert "EngineError: Engine 2 died." in (train.out / "error.log").read_text()


@pytest.mark.parametrize(
    ("error", "code"),
    {TrainingDivergedError: 1, EnvironmentFaultError: 1, CheckpointError: 2, RuntimeError: 1}.items(),
)
def test_error_that_would_repeat_is_not_restarted(error, code, train):
    train(code=code, on_train=failing(error("no room")))
    assert not list(train.out.glob("logs/restart-*.log"))


def test_broken_or_suspect_weights_are_not_saved(train, monkeypatch, tmp_path):
    diverged = tmp_path / "diverged"
    often = "--checkpoint-every 1"
    error = TrainingDivergedError("Not finite.")
    train(f"{often} --keep-checkpoints 1 --out {diverged}", on_train=failing(error), code=1)
    assert names(diverged / "checkpoints") == ["000002", "000002.stopped"]
    train(on_train=failing(PolicyBrokenError("Weights are not finite.")), code=1)
    assert not names(train.out / "checkpoints")
    monkeypatch.setattr(FakeAlgorithm, "health_checks", SimpleNamespace(suspect=True))
    train(f"{often} --out {tmp_path}/suspect")
    assert names(tmp_path / "suspect/checkpoints") == ["000003"]


@pytest.mark.parametrize(
    ("end", "saved", "code"), [("done", ["000003"], 0), ("failed", [], 1), ("interrupted", ["000002"], 130)]
)
def test_end_of_a_run_is_recorded_and_a_tracker_gets_every_iteration(train, monkeypatch, end, saved, code):
    """Ctrl-C ends a run after its iteration, with a checkpoint."""
    calls = []
    monkeypatch.setitem(TRACKERS, "wandb", noting_tracker(calls))
    on_train = {"failed": failing(EngineError("died")), "interrupted": interrupting(2)}.get(end)
    train("--set lr=0.5 --set max_restarts=0 --log-to wandb", on_train=on_train, code=code)
    trained = [*range(1, 4 if end == "done" else 3)]
    assert iterations(train.out) == trained
    assert calls == [("run", None, False, 0.5), *(("run", number, number) for number in trained), ("run", end)]
    assert state(train) == end
    assert names(train.out / "checkpoints") == saved


# -- folders, settings and files that are refused ----------------------------------------------------------------------


def test_empty_folder_is_filled_and_never_replaced(train, monkeypatch):
    """The folder may be a mount point, or the working directory of the command."""
    train.out.mkdir()
    monkeypatch.chdir(train.out)
    (train.out / "mine.txt").touch()
    train(code=2)
    assert os.listdir() == ["mine.txt"]
    os.remove("mine.txt")
    for out in (".", "new"):
        train("--out", out, build_error=CheckpointError("some/model is no model folder."), code=2)
        assert not os.listdir()
    train("--out .")
    assert state(train) == "done"
    assert os.path.samefile(".", train.out)
    assert not [name for name in os.listdir() if name.startswith(".")]


def test_adapter_file_leaves_adapters_of_other_environments(tmp_path):
    file = tmp_path / "adapter.py"
    file.write_text(
        "from trial_ray import EnvironmentAdapter\nADAPTER = EnvironmentAdapter('mine/B-v0', max_turns=9)\n"
    )
    config = GRPOConfig().environment(adapter=[*map(EnvironmentAdapter, ("mine/A-v0", "mine/B-v0"))])
    adapters = resolve_config(config, None, None, [], [file]).adapters
    assert [(adapter.env_id, adapter.max_turns) for adapter in adapters] == [("mine/A-v0", None), ("mine/B-v0", 9)]


QUICKSTART = "alfworld_quickstart --set warm_start=None --set model_path={} --set engine=transformers --set "


@pytest.mark.parametrize(
    ("line", "words"),
    {
        QUICKSTART + "env_config.split=train": "ALFWorld",
        QUICKSTART + "evaluation_num_tasks=100000": "100000 tasks",
        QUICKSTART + "model_path=./nowhere": "./nowhere",
        QUICKSTART + "max_prompt_tokens=100000": "max_prompt_tokens",
        "own_environment --set engine_kwargs.max_bach=8": "max_bach",
    }.items(),
)
def test_missing_inputs_are_found_before_ray_starts(line, words, model_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trial_ray.runs.ray_session.ray_session", None)
    assert cli.main(f"train {line.format(model_path)} --out {tmp_path}/run".split()) == 2
    assert words in capsys.readouterr().err
    assert not names(tmp_path)


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
    "source",
    [
        "stop = {}",
        "x = 1\nconfig = undefined_name",
        EXPERIMENT + "stop = {'training_iteration': 'many'}",
        EXPERIMENT + "stop = {}",
        EXPERIMENT + "stop = {'env_runners/succes_rate': 0.9}",
        EXPERIMENT + "from ray import tune\nconfig = config.training(lr=tune.grid_search([0.1, 0.2]))",
        FEW_TASKS,
    ],
)
def test_broken_experiment_is_the_users_error(train, capsys, source):
    train.file.write_text(source)
    train(code=2)
    assert "Traceback" not in capsys.readouterr().err
    assert not train.out.exists()

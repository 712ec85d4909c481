"""Sweeps with real trials: seeds of one point, a kill and its resume, and failed trials."""

import hashlib
import signal

import pytest
from commands import finished, start, wait_until

from trial_ray.runs.checkpoints import find_checkpoint
from trial_ray.runs.experiment import load_experiment
from trial_ray.runs.reader import RecordedRun
from trial_ray.sweeps.results import SweepResult

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """
from ray import tune

from trial_ray import TRIALConfig

config = (
    TRIALConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 2})
    .rl_module(model_path=MODEL)
    .training(group_size=2, tasks_per_iteration=1, ref_kl_coeff=0.0, hindsight_start_iteration=1)
    .env_runners(max_prompt_tokens=400, max_response_tokens=4, prompt_style="plain")
    .engines(engine="transformers", num_cpus_per_engine=0.25)
    .env_runners(num_env_runners=0, num_cpus_per_env_runner=0.25)
    .learners(num_learners=0, num_cpus_per_learner=0.25)
    .resources(num_cpus_for_main_process=0.25)
)
metric = "learners/default_policy/grpo/entropy"
"""


def sweep_file(folder, model_path, own):
    file = folder / "sweep.py"
    file.write_text(CONFIG.replace("MODEL", repr(model_path)) + own)
    return file


def iterations(folder):
    return sum(file.read_text().count("\n") for file in folder.glob("TRIAL_*/result.json"))


def ends(expected, line, **options):
    code, printed = finished(*line.split(), **options)
    assert code == expected, printed


KEY = "planted-0123456789"
KEYED = f"""
import hashlib

import gymnasium

from trial_envs.alfworld.env import ALFWorldEnv
from trial_ray import EnvironmentAdapter, secret


class Keyed(ALFWorldEnv):
    def __init__(self, api_key, **settings):
        if hashlib.sha256(api_key.encode()).hexdigest() != {hashlib.sha256(KEY.encode()).hexdigest()!r}:
            raise ValueError("the key is wrong")
        super().__init__(**settings)


gymnasium.register("mine/Keyed-v0", entry_point=Keyed)
ADAPTER = EnvironmentAdapter("mine/Keyed-v0")
_keyed = {{**config.env_config, "api_key": secret("JUDGE_LOGIN")}}
config = config.environment("mine/Keyed-v0", env_config=_keyed, adapter=ADAPTER)
config = config.debugging(seed=tune.grid_search([0, 1, 2]))
config = config.health_checks(max_cut_response_rate=None)  # An untrained model seldom ends its responses.
stop = {{"training_iteration": 12}}
max_concurrent_trials = 1
"""
BROKEN = """
config = config.debugging(seed=tune.grid_search([0, 1]))

class Broken(TRIALConfig().algo_class):
    def training_step(self):
        raise RuntimeError('the disk of the data is gone')

config.algo_class = Broken
stop = {"training_iteration": 1}
"""


def test_a_stopped_sweep_continues_and_no_file_has_its_secret(model_path, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_LOGIN", KEY)
    file, out = sweep_file(tmp_path, model_path, KEYED), tmp_path / "out"
    ends(130, f"sweep {file} --out {out}", interrupt_when=lambda: iterations(out) >= 3)
    sweep = start("sweep", file, "--resume", out)
    wait_until(lambda: iterations(out) >= 15, sweep)  # the first trial has ended, the second runs
    sweep.send_signal(signal.SIGKILL)
    sweep.communicate(timeout=60)
    assert iterations(out) < 36
    for name in ("tuner.pkl", "definition.json", "origin.json"):  # Tune was about to write them.
        (out / name).write_bytes(b"")

    ends(0, f"sweep {file} --resume {out}")
    result = SweepResult.load(out)
    assert [(trial.status, trial.iterations) for trial in result.trials] == [("done", 12)] * 3
    for trial in sorted(out.glob("TRIAL_*")):  # a trial's folder is a run folder
        run = RecordedRun(trial)
        assert run.state == "done"
        assert [line["iteration"] for line in run.metrics] == run.recorded == [*range(1, 13)]
        assert find_checkpoint(trial).name == "000012"
    ends(0, f"replay {trial} --iteration 1 --env-adapter {file}")
    (half_width,) = result.points()["half_width"]
    assert half_width > 0  # the seeds gave different weights, tasks and responses
    assert sorted(result.dataframe()["seed"]) == [0, 1, 2]
    assert load_experiment(out / "best.py").config.seed == result.best().parameters["seed"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"tuner.pkl", "params.json", "best.py", "class_and_ctor_args.pkl"} <= {path.name for path in files}
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_failed_trials_are_reported_and_continue(model_path, tmp_path):
    file, out = sweep_file(tmp_path, model_path, BROKEN), tmp_path / "out"
    ends(1, f"sweep {file} --out {out}")
    assert ["the disk of the data is gone" in trial.error for trial in SweepResult.load(out).trials] == [True, True]
    # Failed trials continue in the same folders.
    file.write_text(file.read_text().replace("        raise", "        return super().training_step()\n        raise"))
    folders = {*out.glob("*/run.json")}
    ends(0, f"sweep {file} --resume {out}")
    assert {*out.glob("*/run.json")} == folders

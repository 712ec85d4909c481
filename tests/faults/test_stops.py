"""Stops that end in time and leave nothing: SIGTERM at any moment of a real command, and actors that hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from faulty_env import CountingEnv
from faulty_run import actor, left, pid, pids, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENGINE, ENV_RUNNER, LEARNER

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

EXPERIMENT = """
import os, pathlib, signal, threading, time
from unittest import mock
import ray
from trial_ray.algorithms import GRPO, GRPOConfig, sampling
from trial_ray.evaluation import player
from trial_ray.engines import pool
from trial_ray.warmstart import cloning, warmstart
from trial_ray.warmstart.policy import HeldOutGames

policy = {"model_path": os.environ["TEST_MODEL"]}
if "warm start" in os.environ["TEST_MOMENT"]:
    warmstart.LEAST_RESPONSE_ACCURACY = 0.0  # so that the first check is played
    policy = {"warm_start": {
        "env_config": {"difficulty": "tiny", "max_turns": 4}, "size": "nano", "games": 40, "threads": 1,
        "check_every": 2, "check_games": 200, "evaluation_games": 2, "max_steps": 100_000, "target_success": 1.0,
    }}
config = (
    GRPOConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 2})
    .rl_module(**policy)
    .training(group_size=2, tasks_per_iteration=1, kl_coeff=0.0)
    .env_runners(max_prompt_tokens=400, max_response_tokens=4, prompt_style="plain")
    .engines(engine="transformers", num_cpus_per_engine=0.25)
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
    .learners(num_cpus_per_learner=0.25)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(evaluation_split="generated", evaluation_env_config={"generator_seed": 1}, evaluation_num_tasks=1)
)
stop = {"training_iteration": 100}

def terminate():
    pathlib.Path(os.environ["TEST_SENT"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.Signals[os.environ["TEST_SIGNAL"]])

def then_terminate(owner, name):
    "What follows the signal by a little, or is under way when it comes."
    call, sent = getattr(owner, name), []
    def called(*args, **kwargs):
        if not sent:  # a second signal would stop the run at once
            sent.append(name)
            threading.Timer(0.2, terminate).start()
        return call(*args, **kwargs)
    mock.patch.object(owner, name, called).start()

then_terminate(*{
    "warm start: demonstrations": (warmstart, "collect"),
    "warm start: cloning": (cloning, "cloning_loss"),
    "warm start: check": (HeldOutGames, "play"),
    "ray": (ray, "init"),
    "actors": (pool.EnginePool, "start"),
    "panel": (player.PanelPlayer, "play"),
    "sampling": (sampling.GroupSampler, "sample"),
    "checkpoint": (GRPO, "save_to_path"),
}[os.environ["TEST_MOMENT"]])
"""


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have inherited the mark of a command."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


WARM_START = ["warm start: demonstrations", "warm start: cloning", "warm start: check"]


MOMENTS = [*WARM_START, "ray", "actors", "panel", "sampling", "checkpoint"]


@pytest.mark.parametrize(
    ("moment", "name"),
    [*((each, "SIGTERM") for each in MOMENTS), ("ray", "SIGINT"), ("ray", "SIGHUP"), ("sampling", "SIGHUP")],
)
def test_a_signal_is_recorded_and_leaves_no_process(moment, name, model_path, tmp_path, tell):
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    run, mark = tmp_path / "run", uuid.uuid4().hex
    words = ("train", str(tmp_path / "experiment.py"), "--out", str(run), "--checkpoint-every", "1")
    environment = {
        **os.environ,
        "TEST_MODEL": model_path,
        "TEST_MOMENT": moment,
        "TEST_MARK": mark,
        "TEST_SIGNAL": name,
    }
    environment |= {"TEST_SENT": str(tmp_path / "sent"), "TRIAL_RAY_CACHE": str(tmp_path / "cache")}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from trial_ray.cli import main; sys.exit(main())", *words],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    ended, said = time.time(), done.stdout + done.stderr
    assert done.returncode == 130, said
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    if moment in ("sampling", "checkpoint"):
        assert len(saved) == len([name for name in saved if name.isdecimal()]) > 0
        assert f"stopped after iteration {int(saved[-1])}; the same command continues with --resume {run}" in said
    else:
        assert saved == []
        assert "stopped at once; last checkpoint: none" in said
    # Demonstrations are kept once there are all of them; of anything unfinished nothing is.
    kept = list((tmp_path / "cache").glob("*/*"))  # beside them lies the key that signs checkpoints
    assert [path.parent.name for path in kept] == ["demonstrations"] * (moment in WARM_START[1:])
    assert not [path for path in kept if path.name.startswith(".")]
    deadline = time.monotonic() + 30  # of Ray's daemons, which end by themselves
    while (processes := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes
    seconds = ended - float((tmp_path / "sent").read_text())
    outcome = "saved, exit 130" if saved else "nothing to save, exit 130"
    tell(
        name,
        {"ray": "start of Ray", "actors": "start of actors"}.get(moment, moment),
        outcome,
        seconds,
    )


@pytest.mark.usefixtures("ray_session")
def test_stop_ends_actors_that_are_stopped(model_path, tell):
    with registered(CountingEnv):
        algorithm = tiny_config(model_path, num_learners=1).build_algo()
        processes = pids(algorithm)
        assert len(left(processes)) == 3
        for kind in (ENV_RUNNER, ENGINE, LEARNER):
            os.kill(pid(actor(algorithm, kind)), signal.SIGSTOP)
        began = time.monotonic()
        algorithm.stop()
        seconds = time.monotonic() - began
    deadline = time.monotonic() + 10  # until Ray has reaped them
    while left(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left(processes)
    tell("SIGSTOP of env runner, engine and learner", "algorithm.stop()", "killed", seconds)

"""A command that receives a signal ends in time, saves its state and leaves no process."""

import pytest
from cli_fakes import names, read
from commands import run_python

pytestmark = pytest.mark.timeout(1800)

EXPERIMENT = """
import os, signal, threading
from unittest import mock
import ray
from trial_ray.algorithms import GRPO, GRPOConfig, sampling
from trial_ray.engines import pool
from trial_ray.warmstart import cloning

policy = {"model_path": os.environ["TEST_MODEL"]}
if "warm start" in os.environ["TEST_MOMENT"]:
    policy = {"warm_start": {
        "env_config": {"difficulty": "tiny", "max_turns": 4}, "size": "nano", "games": 40, "threads": 1, "max_steps": 100_000,
    }}
config = (
    GRPOConfig()
    .environment("trial/ALFWorld-v0", env_config={"split": "generated", "difficulty": "tiny", "num_games": 8, "max_turns": 2})
    .rl_module(**policy)
    .training(group_size=2, tasks_per_iteration=1, ref_kl_coeff=0.0)
    .env_runners(max_prompt_tokens=400, max_response_tokens=4, prompt_style="plain")
    .engines(engine="transformers", num_cpus_per_engine=0.25)
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.25)
    .learners(num_cpus_per_learner=0.25)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(evaluation_split="generated", evaluation_env_config={"generator_seed": 1}, evaluation_num_tasks=1)
)
stop = {"training_iteration": 100}

def terminate():
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
    "warm start: cloning": (cloning, "cloning_loss"),
    "ray": (ray, "init"),
    "actors": (pool.EnginePool, "start"),
    "sampling": (sampling.GroupSampler, "sample"),
    "checkpoint": (GRPO, "save_to_path"),
}[os.environ["TEST_MOMENT"]])
"""

COMMAND = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may have been started by nohup
from trial_ray.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("moment", "name"),
    {
        "warm start: cloning": "SIGTERM",
        "ray": "SIGINT",
        "actors": "SIGTERM",
        "sampling": "SIGHUP",
        "checkpoint": "SIGTERM",
    }.items(),
)
def test_a_signal_is_recorded_and_leaves_no_process(moment, name, model_path, tmp_path):
    """``conftest.py`` checks for processes after the last test of this file."""
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    run = tmp_path / "run"
    words = f"train {tmp_path}/experiment.py --out {run} --checkpoint-every 1".split()
    own = {"TEST_MODEL": model_path, "TEST_MOMENT": moment, "TEST_SIGNAL": name, "TRIAL_RAY_CACHE": f"{tmp_path}/cache"}
    done = run_python(COMMAND, *words, **own)
    said = done.stdout + done.stderr
    assert done.returncode == 130, said
    assert read(run / "run.json")["state"] == "interrupted"
    saved = names(run / "checkpoints")
    if moment in ("sampling", "checkpoint"):
        assert saved
        assert all(map(str.isdecimal, saved))
        assert f"stopped after iteration {int(saved[-1])}; the same command continues with --resume {run}" in said
    else:
        assert saved == []
        assert "stopped at once; last checkpoint: none" in said
    # Only complete demonstrations are kept.
    kept = [*tmp_path.glob("cache/*/*")]  # the pattern excludes the signing key
    assert [path.parent.name for path in kept] == ["demonstrations"] * moment.startswith("warm start")
    assert not [path for path in kept if path.name.startswith(".")]

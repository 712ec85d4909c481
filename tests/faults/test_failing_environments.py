"""Environments in processes of their own that fail on real env runners: one rollout is lost, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from fault_table import lost_rows
from faulty_env import CountingEnv
from faulty_run import tiny_config
from user_env import registered

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]
GROUPS, ROLLOUTS, TURNS = 2, 4, 3
STEP_TIMEOUT_S = 10.0
"""Of an iteration that loses one rollout to a hang, on a busy machine."""

FAULTS = {
    "reset_raises": "reset: RuntimeError: cannot start",
    "step_raises": "turn 2: KeyError: 'position'",
    "reset_hangs": "reset: no answer within 10 s",
    "step_hangs": "turn 2: no answer within 10 s",
    "step_stops": "turn 2: no answer within 10 s",
    "step[0]=huge": "turn 2: observation and info have texts of 50,000,032 characters",
    "step_grows": "turn 2: MemoryError",
    "step_dies": "turn 2: its process ended with exit status 3",
    "step_killed": "turn 2: its process ended by signal SIGKILL",
}


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("orders") / "fault"


@pytest.fixture(scope="module")
def algo(ray_session, model_path, orders):
    with registered(CountingEnv):
        config = (
            tiny_config(model_path)
            .environment(CountingEnv.ENV_ID, env_config={"split": "train", "orders": str(orders)})
            .env_runners(
                max_group_redraws=2,
                environment_processes=True,
                step_timeout_s=STEP_TIMEOUT_S,
                environment_memory_gb=0.5,
            )
            .evaluation(evaluation_split="train", evaluation_num_tasks=2)
        )
        algo = config.build_algo()
        algo.train()
        yield algo
        left = [*descendants(algo), psutil.Process(runner_pid(algo))]
        algo.stop()
        assert not psutil.wait_procs(left, timeout=60)[1]


def runner_pid(algo) -> int:
    [pid] = algo.env_runner_group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
    return pid


def descendants(algo) -> list[psutil.Process]:
    """The runner's fork server and the processes of environments."""
    return psutil.Process(runner_pid(algo)).children(recursive=True)


def only_free_environments_have_processes(algo) -> bool:
    [free] = algo.env_runner_group.foreach_env_runner(
        lambda runner: sum(map(len, runner._free_envs.values())), local_env_runner=False
    )
    deadline = time.monotonic() + 30
    while len(descendants(algo)) != 1 + free and time.monotonic() < deadline:
        time.sleep(0.1)
    found = descendants(algo)
    return len(found) == 1 + free and psutil.STATUS_ZOMBIE not in [process.status() for process in found]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rollout_is_lost_and_the_others_are_trained(algo, orders, caplog, tell, fault):
    orders.write_text(fault, encoding="utf-8")
    began = time.monotonic()
    result = algo.train()
    seconds = time.monotonic() - began
    assert not orders.exists()
    assert FAULTS[fault] in caplog.text
    assert f"1 of {GROUPS * ROLLOUTS} rollouts failed" in caplog.text
    assert result["env_runners"]["num_failed_episodes"] == 1
    assert result["env_runners"]["num_episodes"] == GROUPS * ROLLOUTS - 1
    assert (result["groups"]["num_trained"], result["groups"]["num_dropped"]) == (GROUPS, 0)
    assert result["rows"]["given_to_learners"] == (GROUPS * ROLLOUTS - 1) * TURNS
    assert only_free_environments_have_processes(algo)
    tell(
        f"environment: {fault}",
        "2nd turn" if "turn 2" in FAULTS[fault] else "reset",
        "its rollout fails; goes on",
        seconds,
        lost_rows(result),
    )


def test_the_processes_of_a_runner_that_is_killed_die_with_it(algo, tell):
    left = descendants(algo)
    assert len(left) > ROLLOUTS
    psutil.Process(runner_pid(algo)).kill()
    assert not psutil.wait_procs(left, timeout=60)[1]
    began = time.monotonic()
    result = algo.train()
    seconds = time.monotonic() - began
    assert result["groups"]["num_trained"] == GROUPS
    tell(
        "SIGKILL of an env runner with environments in processes",
        "before sampling",
        "restarted; goes on",
        seconds,
        lost_rows(result),
    )

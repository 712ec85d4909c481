"""Environments in processes of their own that fail on real env runners: one rollout is lost, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from fault_checks import lost_rows
from faulty_env import CountingEnv
from faulty_run import pid, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENV_RUNNER

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]
GROUPS, ROLLOUTS, TURNS = 2, 4, 3
FAULTS = {
    "step_hangs": "turn 2: no answer within 5 s",
    "step_grows": "turn 2: MemoryError",
    "step_killed": "turn 2: its process ended by signal SIGKILL",
}
"""Each way in which a process ends; tests/adapters/test_env_process.py has all faults."""


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("orders") / "fault"


@pytest.fixture(scope="module")
def algo(ray_session, model_path, orders):
    with registered(CountingEnv):
        config = (
            tiny_config(model_path)
            .environment(CountingEnv.ENV_ID, env_config={"split": "train", "orders": str(orders)})
            .env_runners(max_group_redraws=2, environment_processes=True, step_timeout_s=5.0, environment_memory_gb=0.5)
        )
        algo = config.build_algo()
        algo.train()
        yield algo
        algo.stop()


def descendants(algo) -> list[psutil.Process]:
    """The runner's fork server and the processes of environments."""
    return psutil.Process(pid(algo, ENV_RUNNER)).children(recursive=True)


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
def test_one_rollout_is_lost_and_the_others_are_trained(algo, orders, caplog, fault):
    orders.write_text(fault, encoding="utf-8")
    result = algo.train()
    assert not orders.exists()
    assert FAULTS[fault] in caplog.text
    assert result["env_runners"]["num_failed_episodes"] == 1
    assert (result["groups"]["num_trained"], result["groups"]["num_dropped"]) == (GROUPS, 0)
    assert result["rows"]["given_to_learners"] == (GROUPS * ROLLOUTS - 1) * TURNS
    assert lost_rows(result) == 0
    assert only_free_environments_have_processes(algo)


def test_the_processes_of_a_runner_that_is_killed_die_with_it(algo):
    left = descendants(algo)
    assert len(left) > ROLLOUTS
    psutil.Process(pid(algo, ENV_RUNNER)).kill()
    assert not psutil.wait_procs(left, timeout=60)[1]
    assert algo.train()["groups"]["num_trained"] == GROUPS

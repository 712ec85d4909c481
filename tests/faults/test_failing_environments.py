"""Environments in processes of their own that fail on real env runners: one rollout is lost, and nothing else.

``tests/adapters/test_env_process.py`` has all ways in which a process fails.
"""

import psutil
import pytest
from fault_checks import lost_rows
from faulty_env import TURNS, CountingEnv
from faulty_run import pid, tiny_config
from user_env import registered

from trial_ray.algorithms.actors import ENV_RUNNER
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.timeout(600)
GROUPS, ROLLOUTS = 2, 4


def descendants(algo):
    """The runner's fork server and the processes of environments."""
    return psutil.Process(pid(algo, ENV_RUNNER)).children(recursive=True)


def test_one_rollout_is_lost_and_no_process_outlives_its_runner(ray_session, model_path, tmp_path):
    orders = tmp_path / "fault"
    config = tiny_config(model_path).environment(env_config={"split": "train", "orders": str(orders)})
    config.env_runners(environment_processes=True, step_timeout_s=5.0, environment_memory_gb=0.5)
    with registered(CountingEnv):
        algo = config.build_algo()
        try:
            algo.train()
            for fault in ("step_hangs", "step_grows", "step_killed"):
                before = descendants(algo)
                orders.write_text(fault)
                metrics = flatten(algo.train())
                assert not orders.exists()
                assert metrics["env_runners/num_failed_episodes"] == 1
                assert metrics["groups/num_trained"] == GROUPS
                assert metrics["groups/num_dropped"] == 0
                assert metrics["rows/given_to_learners"] == (GROUPS * ROLLOUTS - 1) * TURNS
                assert lost_rows(metrics) == 0
                assert psutil.wait_procs(before, timeout=5)[0], "the failed process is gone"
            left = descendants(algo)
            assert len(left) > ROLLOUTS
            psutil.Process(pid(algo, ENV_RUNNER)).kill()
            assert not psutil.wait_procs(left, timeout=60)[1]
            assert algo.train()["groups"]["num_trained"] == GROUPS
        finally:
            algo.stop()

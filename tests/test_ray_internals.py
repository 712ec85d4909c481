"""The private parts of Ray and RLlib that ``trial_ray`` uses behave as expected in the pinned versions."""

import functools
import inspect

import pytest
from ray._private import ray_constants, services, utils, worker
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.rllib.utils.actor_manager import FaultTolerantActorManager

from trial_ray import GRPOConfig, ray_internals, rllib_internals
from trial_ray.rllib_internals import env_runners_of

NODE = 28 * "ab"


@pytest.mark.actors
def test_env_runner_groups_answer_as_expected_and_one_setup_keeps_one(ray_session):
    """RLlib starts Ray for a group, even one without env runners."""
    group = EnvRunnerGroup(config=GRPOConfig(), _setup=False)
    manager = group._worker_manager
    assert isinstance(manager, FaultTolerantActorManager)
    assert rllib_internals.env_runner_actors(group) == {}
    assert manager._num_actor_restarts == 0
    assert group._num_env_runners_dropped_lifetime == 0
    rllib_internals.count_dropped(group)
    assert group._num_env_runners_dropped_lifetime == 1
    assert {"actor_id", "healthy"} <= inspect.signature(manager.set_actor_state).parameters.keys()
    made = algorithm.EnvRunnerGroup
    with env_runners_of(group, 2):
        assert algorithm.EnvRunnerGroup(env_creator=None) is group
    assert group._num_env_runners_dropped_lifetime == 0
    config = GRPOConfig().env_runners(num_env_runners=(1, 4))
    with env_runners_of(None, 0):
        assert algorithm.EnvRunnerGroup(config=config, _setup=False) is not group
    assert algorithm.EnvRunnerGroup is made
    assert ray_internals.draining_nodes() == set()  # tests/faults/test_nodes.py drains a node


def test_patches_of_the_start_of_ray_take_effect_and_are_undone():
    original = utils.set_sigterm_handler
    assert "ray._private.utils.set_sigterm_handler(" in inspect.getsource(worker)
    with ray_internals.without_termination_handler(), ray_internals.local_start():
        assert utils.set_sigterm_handler is not original
        assert not ray_constants.ENABLE_RAY_CLUSTER
    assert utils.set_sigterm_handler is original
    assert ray_constants.ENABLE_RAY_CLUSTER


def test_the_raylet_waits_for_no_port_of_an_agent(monkeypatch, tmp_path):
    """The raylet would end after 15 s, which agents need on a busy machine for their imports."""
    arguments = dict.fromkeys(inspect.signature(services.start_raylet).parameters)
    arguments |= {"session_dir": str(tmp_path), "node_id": NODE, "runtime_env_agent_port": 0}
    seen = {}

    def start_raylet(session_dir, node_id, **further):
        seen.update(further, files={file.name: file.read_text() for file in tmp_path.iterdir()})

    monkeypatch.setattr(services, "start_raylet", functools.wraps(services.start_raylet)(start_raylet))
    with ray_internals.local_start():
        services.start_raylet(**arguments)
    unused = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
    assert seen["files"] == {f"{name}_{NODE}": "-1" for name in unused}
    assert seen["runtime_env_agent_port"] > 0

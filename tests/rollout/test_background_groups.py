"""An env runner that plays groups while it answers calls; the real engine and learner are in tests/e2e."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from faulty_env import TURNS, CountingEnv
from user_env import registered

from trial_ray.algorithms.config import GRPOConfig
from trial_ray.engines.protocol import Response, SamplingParams
from trial_ray.rollout.env_runner import TextEnvRunner
from trial_ray.rollout.groups import GroupRequest, SampleSettings
from trial_ray.rollout.workers import RolloutWorkers

WAIT_S = 60.0
SETTINGS = SampleSettings(
    env_configs=({"split": "train"},), params=SamplingParams(4), iteration=1, keep_trajectories=True
)


class FakeClient:
    """Answers when the gate is open, by the version that it then has; counts what is under way."""

    def __init__(self) -> None:
        self.version = 1
        self.gate = threading.Event()
        self.asked = 0
        self.groups: set[GroupRequest] = set()
        self.under_way = self.most_under_way = 0

    def end_group(self, request) -> None:
        self.groups.discard(request)

    async def generate(self, prompt_ids, params, request, **preferred) -> Response:
        self.asked += 1
        self.groups.add(request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
        finally:
            self.under_way -= 1
        return Response(np.array([10], np.int32), np.zeros(1, np.float32), self.version, "stop")


@pytest.fixture
def runner(model_path, monkeypatch):
    monkeypatch.setattr("trial_ray.rollout.groups.ray.put", lambda value: value)
    with registered(CountingEnv):
        config = (
            GRPOConfig().environment(CountingEnv.ENV_ID, env_config={"split": "train"}).rl_module(model_path=model_path)
        )
        config.env_runners(max_prompt_tokens=200, max_response_tokens=4, prompt_style="plain", max_episodes_in_flight=3)
        runner = TextEnvRunner(config=config, env_creator=None, worker_index=1)
        runner._client = FakeClient()
        yield runner
        runner.stop()


def request(index: int, size: int = 2) -> GroupRequest:
    return GroupRequest(index, "two", size, seed=index)


def until(condition) -> None:
    for _ in range(int(WAIT_S / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen in time")


def taken(runner, count: int) -> list:
    samples = []
    while len(samples) < count:
        assert runner.wait_for_groups(WAIT_S), "nothing ended in time"
        samples += runner.take_groups(2)
    return samples


def test_groups_are_played_while_the_runner_answers_and_new_ones_join_them(runner):
    client = runner.client
    runner.begin_groups([request(0), request(1)], SETTINGS)
    until(lambda: client.under_way == 3)
    assert runner.wait_for_groups(0.01) == 0
    assert runner.take_groups(1) == []
    runner.begin_groups([request(2)], SETTINGS)
    client.gate.set()
    samples = taken(runner, 3)
    assert sorted(sample.request.index for sample in samples) == [0, 1, 2]
    assert client.most_under_way == 3, "max_episodes_in_flight holds for all groups together"
    assert all((sample.num_survivors, sample.num_rows) == (2, 2 * TURNS) for sample in samples)
    assert [sample.refs.header.task_id for sample in samples] == ["two"] * 3


def test_abandoned_groups_end_at_once_and_give_their_environments_back(runner):
    client = runner.client
    runner.begin_groups([request(0), request(1)], SETTINGS)
    until(lambda: client.under_way == 3)
    runner.abandon_groups()
    assert client.under_way == 0
    assert not client.groups, "one had a rollout that still waited for a slot"
    (free,) = runner._free_envs.values()
    assert len(free) == 3
    client.gate.set()
    runner.begin_groups([request(2)], SETTINGS)
    assert [sample.request.index for sample in taken(runner, 1)] == [2]
    assert len(free) == 3


def test_an_error_of_the_runner_itself_reaches_the_next_call(runner):
    async def broken(*args, **kwargs):
        raise LookupError("no such thing")

    runner.client.generate = broken
    runner.begin_groups([request(0)], SETTINGS)
    with pytest.raises(LookupError, match="no such thing"):
        runner.wait_for_groups(WAIT_S)


def test_runners_whose_streams_end_no_group_in_time_are_replaced(monkeypatch):
    workers, replaced = object.__new__(RolloutWorkers), []
    workers._config = SimpleNamespace(sample_timeout_s=5.0)
    monkeypatch.setattr(workers, "_await_runners", lambda: [3, 4, 5])
    monkeypatch.setattr(workers, "_local", lambda: None)
    monkeypatch.setattr(workers, "_actor", lambda runner_id: MagicMock())
    monkeypatch.setattr(workers, "_replace", lambda runner_id, reason: replaced.append((runner_id, reason)))
    monkeypatch.setattr("trial_ray.rollout.workers.ray.wait", lambda streams, **limits: ([], streams))
    assert list(workers.stream_groups([request(0), request(1)], SETTINGS)) == []
    assert replaced == [(runner_id, "ended no group within sample_timeout_s=5 s") for runner_id in (3, 4)]


def test_groups_that_never_end_in_this_process_are_given_up(monkeypatch):
    local = MagicMock(**{"wait_for_groups.return_value": 0, "take_groups.return_value": []})
    workers = object.__new__(RolloutWorkers)
    workers._unfinished, workers._waits, workers._logged = {}, {}, {}
    monkeypatch.setattr(workers, "_await_runners", list)
    monkeypatch.setattr(workers, "_local", lambda: local)
    assert workers.begin_groups([request(0), request(1)], SETTINGS) == {0: 0, 1: 0}
    assert workers.take_groups({0}, 1, 0.01, together=True) == ([], [])
    assert workers.abandon_late() == [0, 1]
    local.abandon_groups.assert_called_once()

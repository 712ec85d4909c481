"""Engine client: routing of groups, failover, and batching of requests and answers."""

import asyncio

import numpy as np
import pytest
from fake_engines import CountingEngine, Handle, passes, run, until
from ray.exceptions import RayActorError

from trial_ray.engines.client import MAX_ATTEMPTS, EngineClient, RequestCounts
from trial_ray.engines.protocol import SamplingParams
from trial_ray.errors import CannotServeError, EngineError


def generate(client, count=1):
    request = np.array([1, 2, 3]), SamplingParams(2)
    return [asyncio.ensure_future(client.generate(*request, group)) for group in range(count)]


@pytest.fixture
def paused():
    """Handle of an engine that samples nothing before ``go_on``."""
    return Handle(CountingEngine(steps=0))


def test_groups_are_spread_evenly_over_engines():
    load = [0] * 8
    for runner in range(3):
        client = EngineClient([Handle()] * 8)
        for group in range(runner, 16, 3):
            load[client._engine_of(group, group)] += 1
    assert load == [2] * 8
    client = EngineClient([Handle()] * 2)
    assert [client._engine_of(group, 0) for group in "ab"] == [0, 1]
    client.end_group("b")
    client.end_group("unknown")
    assert client._engine_of("c", 0) == 1
    assert list(client._group_engine) == ["a", "c"]


def test_requests_of_successive_episodes_share_messages(paused):
    client = EngineClient([paused])

    async def start():
        tasks = []
        for _ in range(32):
            tasks += generate(client)
            await passes(2)
        await until(lambda: len(paused.served) == 32)
        calls = paused.calls
        paused.engine.go_on()
        await asyncio.gather(*tasks)
        return calls

    assert run([paused], start) <= 8


def test_only_sent_and_unanswered_requests_are_aborted(paused):
    client = EngineClient([paused])

    async def cancel():
        sent = generate(client, 3)
        await until(lambda: len(paused.served) == 3)
        [unsent] = generate(client)
        await asyncio.sleep(0)
        for task in (sent[1], unsent):
            task.cancel()
        await asyncio.wait([sent[1], unsent])
        paused.engine.go_on()
        return await asyncio.gather(sent[0], sent[2])

    assert len(run([paused], cancel)) == 2
    assert paused.aborted == [1]
    assert client.counts.requests_failed == 2


class Unreachable(Handle):
    def remote(self, client, batch):
        raise RuntimeError("no connection")


def test_requests_of_failed_engines_go_to_the_next_ones():
    handles = [Handle(error=RayActorError()), Unreachable(), Handle(CountingEngine())]
    client = EngineClient(handles, timeout_s=20)
    run(handles, lambda: asyncio.gather(*generate(client, 21)))
    assert len(handles[2].served) == 21
    assert client.counts == RequestCounts(21, 21, requests_failed=0, attempts_failed=7 * (2 + 1))
    dead = [Handle(error=RayActorError()) for _ in range(MAX_ATTEMPTS + 1)]
    with pytest.raises(EngineError):
        run(dead, lambda: asyncio.gather(*generate(EngineClient(dead))))
    assert [len(handle.served) for handle in dead] == [1] * MAX_ATTEMPTS + [0]


def test_an_engine_that_hangs_leaves_time_for_another():
    handles = [Handle(), Handle(CountingEngine())]
    run(handles, lambda: asyncio.gather(*generate(EngineClient(handles, timeout_s=2.0))))
    assert len(handles[1].served) == 1


def test_a_step_that_does_not_end_is_reported(monkeypatch, paused):
    monkeypatch.setattr("trial_ray.engines.actor.STEP_TIMEOUT_S", 0.05)

    async def probe():
        [request] = generate(EngineClient([paused]))
        await until(lambda: paused.engine.running)
        await asyncio.sleep(0.1)
        with pytest.raises(CannotServeError):
            await paused.engine.weight_version()
        paused.engine.go_on()
        await request
        return await paused.engine.weight_version()

    assert run([paused], probe) == 3


def test_a_late_answer_to_an_earlier_event_loop_is_ignored():
    calls = []

    class Late(Handle):
        def remote(self, client, batch):
            calls.append(asyncio.get_running_loop().create_future())
            return calls[-1]

    client = EngineClient([Late()])

    async def start():
        [task] = generate(client)
        await asyncio.sleep(0.01)
        return task

    with asyncio.Runner() as earlier, asyncio.Runner() as later:
        earlier.run(start()).cancel()
        task = later.run(start())
        calls[0].set_exception(RayActorError())
        earlier.run(asyncio.sleep(0.01))
        later.run(asyncio.sleep(0.01))
        assert not task.done()
        assert len(calls) == 2


def test_a_client_calls_again_after_an_empty_reply(monkeypatch, paused):
    monkeypatch.setattr("trial_ray.engines.link.FETCH_TIMEOUT_S", 0.01)

    async def main():
        [request] = generate(EngineClient([paused]))
        await until(lambda: paused.calls > 2)
        paused.engine.go_on()
        return await request

    assert run([paused], main).finish_reason == "length"


def test_answers_of_clients_that_are_gone_are_dropped(monkeypatch):
    monkeypatch.setattr("trial_ray.engines.link.FORGET_AFTER_S", 0.0)
    engine = CountingEngine()
    clients = [EngineClient([Handle(engine)]) for _ in range(5)]

    async def in_turn():
        for client in clients:
            await asyncio.gather(*generate(client))

    run([Handle(engine)], in_turn)
    assert len(engine._answers) == 1

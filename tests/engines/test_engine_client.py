"""Engine client: routing of groups, failover, and batching of requests and answers."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engines import CountingEngine, Handle, healthy, run, until
from ray.exceptions import RayActorError

from trial_ray.engines import actor, link
from trial_ray.engines.client import MAX_ATTEMPTS, EngineClient
from trial_ray.engines.protocol import InvalidRequestError, SamplingParams
from trial_ray.errors import CannotServeError, EngineError

PROMPT = np.array([1, 2, 3], dtype=np.int32)
PARAMS = SamplingParams(max_tokens=2)


def generate(client, count=1):
    return [asyncio.ensure_future(client.generate(PROMPT, PARAMS, group)) for group in range(count)]


def responses_of(handles, count=1, **kwargs):
    client = EngineClient(handles, **kwargs)
    return run(handles, lambda: asyncio.gather(*generate(client, count)))


@pytest.fixture
def paused():
    """Handle of an engine that samples nothing before ``go_on``."""
    return Handle(CountingEngine(steps=0))


@pytest.mark.parametrize("runners", [1, 3, 16])
def test_consecutive_groups_are_spread_evenly(runners):
    load = [0] * 8
    for runner in range(runners):
        client = EngineClient([Handle() for _ in range(8)])
        for group in range(runner, 16, runners):
            load[client._engine_of(group, group)] += 1
    assert load == [2] * 8


def test_an_ended_group_frees_its_engine():
    client = EngineClient([Handle() for _ in range(2)])
    first, second = client._engine_of("a", 0), client._engine_of("b", 0)
    client.end_group("b")
    client.end_group("unknown")
    assert (first, second, client._engine_of("c", 0)) == (0, 1, 1)
    assert list(client._group_engine) == ["a", "c"]


def test_each_request_gets_its_response_as_soon_as_it_ends():
    handles = healthy()
    client = EngineClient(handles)
    ended = []

    async def one(index):
        params = SamplingParams(max_tokens=1 + 40 * (index == 0))
        response = await client.generate(np.array([index, 5], np.int32), params, 0)
        ended.append(index)
        return response

    responses = run(handles, lambda: asyncio.gather(*map(one, range(10))))
    assert [response.response_ids.tolist() for response in responses] == [[0] * 41, *([n] for n in range(1, 10))]
    assert {(r.weight_version, r.finish_reason, r.logprobs.dtype.name) for r in responses} == {(3, "length", "float32")}
    assert ended[-1] == 0


def test_requests_of_successive_episodes_share_messages(paused):
    client = EngineClient([paused])

    async def start():
        tasks = []
        for _ in range(32):
            tasks += generate(client)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
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


INVALID_PROMPTS = [
    np.array([], np.int32),
    np.array([[1]]),
    np.array([1.0]),
    np.array([100]),
    np.array([-1]),
    np.full(63, 1),
]
INVALID_PARAMS = [
    {"max_tokens": 0},
    {"max_tokens": True},
    {"seed": -1},
    {"seed": 2**63},
    {"stop": ("",)},
    {"temperature": float("nan")},
    {"temperature": 0.009},
    {"temperature": 2.1},
    {"top_p": 0.0},
    {"top_p": 1.1},
]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [*((prompt, {}) for prompt in INVALID_PROMPTS), *((PROMPT, params) for params in INVALID_PARAMS)],
)
def test_an_invalid_request_is_rejected_alone(prompt, params):
    handles = healthy(2)
    client = EngineClient(handles, timeout_s=20)

    async def both():
        invalid = client.generate(prompt, replace(PARAMS, **params), 0)
        return await asyncio.gather(invalid, *generate(client), return_exceptions=True)

    error, response = run(handles, both)
    assert isinstance(error, InvalidRequestError)
    assert response.response_ids.tolist() == [1, 1]
    assert (handles[1].calls, client.counts.attempts_failed) == (0, 0)


class Unreachable(Handle):
    def remote(self, client, batch):
        raise RuntimeError("no connection")


@pytest.mark.parametrize("failing", [Handle(error=RayActorError()), Unreachable()], ids=["dead", "unreachable"])
def test_requests_of_a_failed_engine_go_to_the_next(failing):
    handles = [failing, *healthy(), failing]
    client = EngineClient(handles, timeout_s=20)
    run(handles, lambda: asyncio.gather(*generate(client, 20)))
    assert len(handles[1].served) == 20
    counts = client.counts
    assert (counts.requests_sent, counts.requests_answered, counts.requests_failed) == (20, 20, 0)
    assert counts.attempts_failed == 7 + 2 * 6


def test_the_error_of_a_request_names_every_attempt():
    handles = [Handle(error=RayActorError()) for _ in range(6)]
    with pytest.raises(EngineError, match=r"engine 0: EngineError.*engine 1: .*engine 2: "):
        responses_of(handles)
    assert sum(len(handle.served) for handle in handles) == MAX_ATTEMPTS


def test_an_engine_that_hangs_leaves_time_for_another():
    with pytest.raises(EngineError, match="TimeoutError"):
        responses_of([Handle()], timeout_s=0.05)
    handles = [Handle(), *healthy()]
    responses_of(handles, timeout_s=2.0)
    assert len(handles[1].served) == 1


def test_a_step_that_does_not_end_is_reported(monkeypatch, paused):
    monkeypatch.setattr(actor, "STEP_TIMEOUT_S", 0.05)

    async def probe():
        request = generate(EngineClient([paused]))
        await until(lambda: paused.engine.running)
        await asyncio.sleep(0.1)
        with pytest.raises(CannotServeError):
            await paused.engine.weight_version()
        paused.engine.go_on()
        await asyncio.gather(*request)
        return await paused.engine.weight_version()

    assert run([paused], probe) == 3


def test_a_late_answer_to_an_earlier_event_loop_is_ignored():
    calls = []

    class Late:
        def remote(self, client, batch):
            calls.append(asyncio.get_running_loop().create_future())
            return calls[-1]

    client = EngineClient([SimpleNamespace(exchange=Late())])

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
    monkeypatch.setattr(link, "FETCH_TIMEOUT_S", 0.01)

    async def main():
        request = generate(EngineClient([paused]))
        await until(lambda: paused.calls > 2)
        paused.engine.go_on()
        return await asyncio.gather(*request)

    assert len(run([paused], main)) == 1


def test_answers_of_clients_that_are_gone_are_dropped(monkeypatch):
    monkeypatch.setattr(link, "FORGET_AFTER_S", 0.0)
    engine = CountingEngine()
    clients = [EngineClient([Handle(engine)]) for _ in range(5)]

    async def in_turn():
        for client in clients:
            await asyncio.gather(*generate(client))

    run([Handle(engine)], in_turn)
    assert len(engine._answers) == 1

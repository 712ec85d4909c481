"""Where requests go: one engine per group, another one when it fails; in few messages, none waiting for another."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engines import CountingEngine, Handle, healthy, run, until
from ray.exceptions import RayActorError

from trial_ray.engines import actor as batching_engine
from trial_ray.engines import link as link_module
from trial_ray.engines.client import MAX_ATTEMPTS, EngineClient
from trial_ray.engines.protocol import InvalidRequestError, SamplingParams
from trial_ray.errors import EngineError

PROMPT = np.array([1, 2, 3], dtype=np.int32)
PARAMS = SamplingParams(max_tokens=2)


def ask(handles, affinities, **kwargs):
    client = EngineClient(handles, **kwargs)
    return run(handles, lambda: asyncio.gather(*[client.generate(PROMPT, PARAMS, affinity) for affinity in affinities]))


@pytest.mark.parametrize("runners", [1, 2, 3, 16])
def test_several_runners_deal_evenly_when_groups_are_numbered_through(runners):
    load = [0] * 8
    for runner in range(runners):
        client = EngineClient([Handle() for _ in range(8)])
        for group in range(runner, 16, runners):  # as EnvRunnerPool deals them
            load[client._engine_of(group, group)] += 1
    assert load == [2] * 8


def test_a_group_that_ended_makes_room_and_is_forgotten():
    client = EngineClient([Handle() for _ in range(2)])
    first, second = client._engine_of("a", 0), client._engine_of("b", 0)
    client.end_group("b")
    client.end_group("never seen")
    assert (first, second, client._engine_of("c", 0)) == (0, 1, 1)
    for group in range(100):
        client._engine_of(group, 0)
        client.end_group(group)
    assert len(client._group_engine) == 2


def test_every_coroutine_gets_the_response_to_its_own_prompt_and_short_ones_do_not_wait():
    handles = healthy()
    client = EngineClient(handles)
    ended = []

    async def one(index):
        prompt = np.array([index, 5], dtype=np.int32)
        response = await client.generate(prompt, SamplingParams(max_tokens=1 + 40 * (index == 0)), 0)
        ended.append(index)
        return response

    responses = run(handles, lambda: asyncio.gather(*map(one, range(10))))
    assert [response.response_ids.tolist() for response in responses] == [
        [0] * 41,
        *([index] for index in range(1, 10)),
    ]
    assert {(r.weight_version, r.finish_reason, r.logprobs.dtype.name) for r in responses} == {(3, "length", "float32")}
    assert ended[-1] == 0


def test_episodes_that_start_one_after_the_other_ask_in_few_messages():
    handles = [Handle(CountingEngine(steps=0))]
    client = EngineClient(handles)

    async def start():
        asked = []
        for _ in range(32):
            asked.append(asyncio.create_task(client.generate(PROMPT, PARAMS, 0)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until(lambda: len(handles[0].served) == 32)
        calls = handles[0].calls
        handles[0].engine.go_on()
        await asyncio.gather(*asked)
        return calls

    assert run(handles, start) <= 8


def test_only_requests_that_were_sent_and_not_answered_are_abandoned():
    handles = [Handle(CountingEngine(steps=0))]
    client = EngineClient(handles)

    async def abandon():
        sent = [asyncio.create_task(client.generate(PROMPT, PARAMS, 0)) for _ in range(3)]
        await until(lambda: len(handles[0].served) == 3)
        unsent = asyncio.create_task(client.generate(PROMPT, PARAMS, 0))
        await asyncio.sleep(0)
        for task in (sent[1], unsent):
            task.cancel()
        await asyncio.wait([sent[1], unsent])
        handles[0].engine.go_on()
        return await asyncio.gather(sent[0], sent[2])

    assert len(run(handles, abandon)) == 2
    assert handles[0].aborted == [1]
    assert client.counts.requests_failed == 2


def test_a_dead_engine_is_passed_over():
    handles = [Handle(error=RayActorError()), *healthy(), Handle(error=RayActorError())]
    responses = ask(handles, range(20))
    assert len(responses) == 20
    assert len(handles[1].served) == 20


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (np.array([], np.int32), PARAMS),
        (np.array([[1]]), PARAMS),
        (np.array([1.0]), PARAMS),
        (np.array([100]), PARAMS),
        (np.array([-1]), PARAMS),
        (np.full(63, 1), PARAMS),
        (PROMPT, SamplingParams(0)),
        (PROMPT, SamplingParams(True)),
        (PROMPT, SamplingParams(2, seed=-1)),
        (PROMPT, SamplingParams(2, seed=2**63)),
        (PROMPT, SamplingParams(2, stop=("",))),
        (PROMPT, SamplingParams(2, temperature=float("nan"))),
        (PROMPT, SamplingParams(2, temperature=0.009)),
        (PROMPT, SamplingParams(2, temperature=2.1)),
        (PROMPT, SamplingParams(2, top_p=0.0)),
        (PROMPT, SamplingParams(2, top_p=1.1)),
    ],
)
def test_an_invalid_request_is_rejected_alone(prompt, params):
    handles = healthy(2)
    client = EngineClient(handles, timeout_s=20)

    async def both():
        invalid = client.generate(prompt, params, 0)
        return await asyncio.gather(invalid, client.generate(PROMPT, PARAMS, 0), return_exceptions=True)

    error, response = run(handles, both)
    assert isinstance(error, InvalidRequestError)
    assert response.response_ids.tolist() == [1, 1]
    assert (handles[1].calls, client.counts.attempts_failed) == (0, 0)


def test_a_call_that_cannot_be_made_fails_what_it_would_have_carried():
    class Unreachable(Handle):
        def remote(self, client, batch):
            raise RuntimeError("no connection")

    handles = [Unreachable(), *healthy()]
    client = EngineClient(handles, timeout_s=20)
    [first, second] = run(
        handles, lambda: asyncio.gather(*[client.generate(PROMPT, PARAMS, "group") for _ in range(2)])
    )
    assert first.finish_reason == second.finish_reason == "length"
    assert client.counts.attempts_failed == 2


def test_when_every_attempt_fails_the_error_names_each():
    handles = [Handle(error=RayActorError()) for _ in range(6)]
    with pytest.raises(EngineError, match=r"engine 0: .*(ActorDied|RayActorError).*engine 1: "):
        ask(handles, [0])
    assert sum(len(handle.served) for handle in handles) == MAX_ATTEMPTS


def test_an_engine_that_hangs_meets_the_deadline_and_leaves_time_for_another():
    with pytest.raises(EngineError, match="TimeoutError"):
        ask([Handle()], [0], timeout_s=0.05)
    handles = [Handle(), *healthy()]
    [response] = ask(handles, [0], timeout_s=2.0)
    assert response.finish_reason == "length"
    assert len(handles[1].served) == 1


def test_an_engine_whose_step_does_not_end_says_that_it_cannot_serve(monkeypatch):
    """Its event loop answers all the same, so that a probe would take it for healthy."""
    monkeypatch.setattr(batching_engine, "STEP_TIMEOUT_S", 0.05)
    handles = [Handle(CountingEngine(steps=0))]

    async def probe():
        client = EngineClient(handles)
        request = asyncio.ensure_future(client.generate(PROMPT, SamplingParams(max_tokens=1), 0))
        await until(lambda: handles[0].engine.running)
        await asyncio.sleep(0.1)
        with pytest.raises(EngineError, match=r"cannot serve: a step has been running for"):
            await handles[0].engine.weight_version()
        handles[0].engine.go_on()
        await request
        return await handles[0].engine.weight_version()

    assert run(handles, probe) == 3


def test_a_late_answer_to_an_earlier_event_loop_leaves_requests_of_another_alone():
    calls = []

    class Late:
        def remote(self, client, batch):
            calls.append(asyncio.get_running_loop().create_future())
            return calls[-1]

    client = EngineClient([SimpleNamespace(exchange=Late())])

    async def begun():
        asked = asyncio.create_task(client.generate(PROMPT, PARAMS, 0))
        await asyncio.sleep(0.01)
        return asked

    with asyncio.Runner() as earlier, asyncio.Runner() as later:
        earlier.run(begun()).cancel()
        asked = later.run(begun())
        calls[0].set_exception(RayActorError())
        earlier.run(asyncio.sleep(0.01))
        later.run(asyncio.sleep(0.01))
        assert not asked.done()
        assert len(calls) == 2


def test_an_engine_that_has_nothing_lets_the_client_ask_again(monkeypatch):
    monkeypatch.setattr(link_module, "FETCH_TIMEOUT_S", 0.01)
    handles = [Handle(CountingEngine(steps=0))]

    async def main():
        asked = asyncio.ensure_future(EngineClient(handles).generate(PROMPT, PARAMS, 0))
        await until(lambda: handles[0].calls > 2)
        handles[0].engine.go_on()
        return await asked

    assert run(handles, main).finish_reason == "length"


def test_what_nobody_fetches_is_dropped(monkeypatch):
    monkeypatch.setattr(link_module, "FORGET_AFTER_S", 0.0)
    engine = CountingEngine()
    clients = [EngineClient([Handle(engine)]) for _ in range(5)]

    async def in_turn():
        for client in clients:
            await client.generate(PROMPT, PARAMS, 0)

    run([Handle(engine)], in_turn)
    assert len(engine._answers) == 1

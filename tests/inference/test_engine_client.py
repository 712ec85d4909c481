"""Where requests go: one engine per group, another one when it fails, and an error that says what was tried."""

import asyncio

import numpy as np
import pytest
from ray.exceptions import RayActorError

from trial_ray.errors import EngineError
from trial_ray.inference.client import ATTEMPTS, EngineClient
from trial_ray.inference.protocol import Response, SamplingParams

PROMPT = np.array([1, 2, 3], dtype=np.int32)
PARAMS = SamplingParams(max_tokens=2)


class FakeEngine:
    """Stands in for an actor handle: ``generate.remote`` answers, fails or hangs."""

    def __init__(self, error=None, hangs=False):
        self.served = 0
        self.error = error
        self.hangs = hangs
        self.generate = self

    async def remote(self, prompt_ids, params):
        self.served += 1
        if self.hangs:
            await asyncio.sleep(60)
        if self.error:
            raise self.error
        return Response(np.array([7], dtype=np.int32), np.array([-0.5], dtype=np.float32), 0, "stop")


def ask(client, affinities):
    async def everything():
        return await asyncio.gather(*[client.generate(PROMPT, PARAMS, affinity) for affinity in affinities])

    return asyncio.run(everything())


def test_requests_of_one_group_share_an_engine():
    engines = [FakeEngine() for _ in range(4)]
    ask(EngineClient(engines), ["task-17"] * 8)
    assert sorted(engine.served for engine in engines) == [0, 0, 0, 8]


def test_groups_spread_over_the_engines():
    engines = [FakeEngine() for _ in range(4)]
    ask(EngineClient(engines), [f"task-{index}" for index in range(200)])
    assert all(engine.served > 25 for engine in engines)


def test_a_group_goes_to_the_same_engine_from_every_process():
    first, second = [FakeEngine() for _ in range(3)], [FakeEngine() for _ in range(3)]
    affinities = [f"trial/{index}" for index in range(30)]
    ask(EngineClient(first), affinities)
    ask(EngineClient(second), affinities)
    assert [engine.served for engine in first] == [engine.served for engine in second]


def test_a_dead_engine_is_passed_over():
    engines = [FakeEngine(RayActorError()), FakeEngine(), FakeEngine(RayActorError())]
    responses = ask(EngineClient(engines), range(20))
    assert len(responses) == 20
    assert engines[1].served == 20


def test_when_every_engine_fails_the_error_names_each():
    client = EngineClient([FakeEngine(RayActorError()), FakeEngine(RayActorError())])
    with pytest.raises(EngineError, match=r"engine 0: .*engine 1: |engine 1: .*engine 0: "):
        ask(client, [0])


def test_an_engine_that_hangs_meets_the_deadline():
    client = EngineClient([FakeEngine(hangs=True)], timeout_s=0.05)
    with pytest.raises(EngineError, match="TimeoutError"):
        ask(client, [0])


def test_attempts_are_bounded():
    engines = [FakeEngine(RayActorError()) for _ in range(6)]
    with pytest.raises(EngineError):
        ask(EngineClient(engines), [0])
    assert sum(engine.served for engine in engines) == ATTEMPTS


def test_replaced_handles_are_used_at_once():
    client = EngineClient([FakeEngine(RayActorError())])
    fresh = FakeEngine()
    client.replace_handles([fresh])
    ask(client, [0])
    assert fresh.served == 1


def test_a_client_without_engines_is_refused():
    with pytest.raises(EngineError, match="at least one"):
        EngineClient([])

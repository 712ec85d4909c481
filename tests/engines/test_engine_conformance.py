"""Conformance of every engine: responses and weights are compared with transformers' own forward pass."""

import asyncio
import copy
import itertools
from collections import namedtuple
from dataclasses import replace

import numpy as np
import psutil
import pytest
import ray
import torch
from architectures import randomise
from transformers import TopPLogitsWarper

from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import InvalidRequestError, SamplingParams
from trial_ray.engines.weights import TextLogprobs, own_logprobs, pack_weights
from trial_ray.errors import ConfigError, EngineError, WeightSyncError

pytestmark = pytest.mark.actors

VOCAB_SIZE, STOP_IDS = 300, [7, 8]  # of the tiny model in conftest
MAX_MODEL_LEN = 400
VERSIONS = itertools.count(1)
TEXT = np.arange(200, 240)  # No prompt of the tests begins with it.

ON_CUDA = {"dtype": "float32", "block_size": 32}
ENGINES = {
    "transformers": {"max_batch": 16},
    # These values of vLLM's own arguments differ from the defaults of this package and of vLLM.
    "vllm": {"max_num_batched_tokens": 4096, "max_num_seqs": 15, "num_gpu_blocks_override": 400},
    "vllm on CUDA": ON_CUDA,
    "vllm on CUDA, with its fall-backs": {**ON_CUDA, "v2_model_runner": False, "async_scheduling": False},
}
MARKS = {"vllm": [pytest.mark.vllm, pytest.mark.timeout(1800)], "CUDA": [pytest.mark.gpu]}


class Engine(namedtuple("Engine", "name pool client learner")):
    """One running engine, and the learner's model whose weights it has."""

    def send(self, model):
        version = next(VERSIONS)
        self.pool.sync(pack_weights(model.named_parameters(), version, text=text_of(model)))
        return version

    def generate(self, prompts, params):
        """Return the responses to prompts, or the errors."""

        async def main():
            responses = [self.client.generate(*request, 0) for request in zip(prompts, params, strict=True)]
            return await asyncio.gather(*responses, return_exceptions=True)

        return asyncio.run(main())

    def ids(self, prompts, params):
        return [response.response_ids.tolist() for response in self.generate(prompts, params)]

    def call(self, method, *arguments):
        return ray.get(getattr(self.pool.handles[0], method).remote(*arguments), timeout=60)


def text_of(model):
    return TextLogprobs(TEXT, own_logprobs(model, TEXT), 1e-4, "Qwen3ForCausalLM")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[mark for part, marks in MARKS.items() if part in name for mark in marks])
        for name in ENGINES
    ],
)
def started(request, ray_session, tiny_qwen3):
    """Name, pool and client of an engine, which rejects requests before it has weights and has no process of its own."""
    pool = EnginePool(
        engine=request.param.split()[0],
        model_path=str(tiny_qwen3),
        num_engines=1,
        engine_kwargs={"max_model_len": MAX_MODEL_LEN, "num_threads": 1, **ENGINES[request.param]},
        num_cpus_per_engine=0.2,
        num_gpus_per_engine=float("CUDA" in request.param),
    )
    try:
        [info] = pool.start(timeout_s=500)
        client = EngineClient(pool.handles, timeout_s=120)
        with pytest.raises(EngineError, match="no weights"):
            asyncio.run(client.generate(np.array([1, 2, 3]), SamplingParams(2), 0))
        assert info["vocab_size"] == VOCAB_SIZE
        assert psutil.Process(info["pid"]).children(recursive=True) == []
        yield request.param, pool, client
    finally:
        pool.stop()


@pytest.fixture
def engine(started, model):
    """The engine of this module, with the weights of the model's folder."""
    running = Engine(*started, copy.deepcopy(model))
    running.send(running.learner)
    return running


def make_prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, VOCAB_SIZE, rng.integers(3, 100), np.int32) for _ in range(count)]


def seeded(count, max_tokens, **params):
    return [SamplingParams(max_tokens, seed=seed, **params) for seed in range(count)]


def reference_logits(model, prompt, response):
    """Return the model's logits float32 ``[y, V]`` at every position of the response."""
    ids = torch.as_tensor(np.concatenate([prompt, response.response_ids]), dtype=torch.long)[None]
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1]


def assert_logprobs_of(model, prompts, responses, tolerance=1e-4, temperature=1.0, top_p=1.0):
    """Assert that responses report, to ``tolerance`` nats, the distribution that they were sampled from."""
    for prompt, response in zip(prompts, responses, strict=True):
        scaled = reference_logits(model, prompt, response).double() / temperature
        logprobs = torch.log_softmax(TopPLogitsWarper(top_p)(None, scaled), -1).numpy()
        expected = logprobs[range(len(response.response_ids)), response.response_ids]
        np.testing.assert_allclose(response.logprobs, expected, atol=tolerance, rtol=0, equal_nan=False)


def test_each_request_of_a_mixed_batch_reports_its_own_distribution(engine):
    kinds = [(0.0, 1.0), (0.0, 0.5), (0.7, 1.0), (0.7, 0.9), (1.0, 1.0), (1.0, 0.3), (1.3, 1.0), (1.3, 0.8)] * 5
    prompts = [*make_prompts(len(kinds) - 1, seed=12), np.full(MAX_MODEL_LEN - 6, 11)]
    params = [SamplingParams(6, *kind, seed) for seed, kind in enumerate(kinds)]
    for prompt, response, (temperature, top_p) in zip(prompts, engine.generate(prompts, params), kinds, strict=True):
        assert (response.response_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
        sampled = (temperature, top_p) if temperature else ()
        # On CUDA, vLLM may keep a token too many in the nucleus if two have nearly the same probability.
        tolerance = 1e-2 if "CUDA" in engine.name and top_p < 1 else 1e-4
        assert_logprobs_of(engine.learner, [prompt], [response], tolerance, *sampled)
        if not temperature:
            highest = reference_logits(engine.learner, prompt, response).log_softmax(-1).amax(-1)
            np.testing.assert_allclose(response.logprobs, highest, atol=1e-4, rtol=0)


INVALID_PROMPTS = [[[1]], [1.0], [VOCAB_SIZE], [-1], [1] * (MAX_MODEL_LEN - 1), np.array([], np.int32)]
INVALID_PARAMS = [
    {"max_tokens": 0}, {"max_tokens": True}, {"seed": -1}, {"seed": 2**63}, {"stop": ("",)}, {"temperature": float("nan")},
    {"temperature": 0.009}, {"temperature": 2.1}, {"top_p": 0.0}, {"top_p": 1.1},
]  # fmt: skip


def test_invalid_requests_are_rejected_alone(engine):
    (prompt,), (valid,) = make_prompts(1), seeded(1, 2)
    prompts = [prompt, *map(np.array, INVALID_PROMPTS)]
    params = [replace(valid, **each) for each in INVALID_PARAMS]
    response, *errors = engine.generate(prompts + [prompt] * len(params), [valid] * len(prompts) + params)
    assert_logprobs_of(engine.learner, [prompt], [response])
    assert {type(error) for error in errors} == {InvalidRequestError}


def test_every_stop_token_ends_the_response_and_belongs_to_it(engine):
    with torch.no_grad():
        engine.learner.model.embed_tokens.weight[STOP_IDS] *= 3  # Their logits are now among the largest or smallest.
    engine.send(engine.learner)
    prompts = make_prompts(32)
    responses = engine.generate(prompts, seeded(32, 12))
    assert_logprobs_of(engine.learner, prompts, responses)
    assert {r.response_ids[-1] for r in responses if r.finish_reason == "stop"} == {*STOP_IDS}
    for response in responses:
        sampled_before = response.response_ids[: -1 if response.finish_reason == "stop" else None]
        assert not np.isin(sampled_before, STOP_IDS).any()


def test_a_stop_string_ends_the_response_with_its_last_token(engine):
    prompts, params = make_prompts(4, seed=5), seeded(4, 12)
    full = engine.generate(prompts, params)
    for max_tokens in (12, 5):
        for index, response in enumerate(full):
            stop = ("{}><{}".format(*response.response_ids[3:5]), "never")
            params[index] = replace(params[index], max_tokens=max_tokens, stop=stop)
        for response, whole in zip(engine.generate(prompts, params), full, strict=True):
            assert (response.response_ids.tolist(), response.finish_reason) == (whole.response_ids[:5].tolist(), "stop")
            np.testing.assert_allclose(response.logprobs, whole.logprobs[:5], atol=1e-4)


def test_the_report_counts_tokens_and_busy_seconds(engine):
    before = engine.call("report")
    for _ in range(2):
        engine.generate([np.arange(20, 110)], seeded(1, 3, temperature=0))
    after = engine.call("report")
    assert after["prompt_tokens"] - before["prompt_tokens"] == 2 * 90
    assert after["busy_seconds"] > before["busy_seconds"]
    if "vllm" in engine.name:  # Two whole blocks of 32 tokens of the second prompt were cached.
        assert after["cached_tokens"] - (before["cached_tokens"] or 0) == 64


def test_a_seed_repeats_its_response_in_any_batch(engine):
    prompts, params = make_prompts(10, seed=3), seeded(10, 6)
    alone = [engine.ids([prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    assert engine.ids(prompts, params) == alone
    assert len(set(map(tuple, engine.ids(prompts[:1] * 16, seeded(16, 6))))) > 8


def test_an_update_during_responses_mixes_no_versions_and_drops_the_cache(engine):
    other, new = copy.deepcopy(engine.learner), next(VERSIONS)
    randomise(other)
    models = {engine.send(engine.learner): engine.learner, new: other}
    shards = pack_weights(other.named_parameters(), new)
    prompts = make_prompts(30, seed=7) * 2  # The old weights have cached what the new ones read.

    async def update_during_responses():
        def start(prompt, max_tokens=20):
            return asyncio.ensure_future(engine.client.generate(prompt, SamplingParams(max_tokens, seed=1), 0))

        tasks = [start(prompts[0], max_tokens=1), *map(start, prompts[1:30])]
        await tasks[0]  # The others are running now.
        update = engine.pool.handles[0].load_weights.remote(shards)
        tasks += map(start, prompts[30:])
        responses = await asyncio.gather(*tasks)
        await update
        return responses

    responses = asyncio.run(update_during_responses())
    for prompt, response in zip(prompts, responses, strict=True):
        assert_logprobs_of(models[response.weight_version], [prompt], [response])
    assert responses[0].weight_version != new
    assert responses[-1].weight_version == new


def test_aborted_requests_are_sampled_no_further(engine):
    before = engine.call("report")["response_tokens"]
    # Long responses are still running when the aborts arrive, also on a busy machine.
    long = SamplingParams(MAX_MODEL_LEN - 100, 2.0, seed=1)
    prompts = make_prompts(20, seed=8)

    async def cancel_all_but_one():
        tasks = [asyncio.ensure_future(engine.client.generate(prompt, long, 0)) for prompt in prompts]
        await engine.client.generate(make_prompts(1, seed=9)[0], replace(long, max_tokens=1), 0)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks)
        return tasks[0].result()

    response = asyncio.run(cancel_all_but_one())
    engine.send(engine.learner)  # It waits for the running responses.
    assert engine.call("report")["response_tokens"] - before == 1 + len(response.response_ids)
    assert engine.ids(prompts[:1], [long]) == [response.response_ids.tolist()]


OVERFLOWING = 9  # No prompt of make_prompts contains it.


def overflow_at(model, token):
    """Make finite weights under which the activations of one token overflow in any dtype, and those of others do not.

    Only the token's embedding has a first component, which the first layer's feed-forward network multiplies by a huge factor.
    """
    layer, embedding = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = 0
        embedding[token] = 0
        embedding[token, 0] = 1
        model.model.norm.weight[0] = 0  # Its logit is 0, so that no greedy response contains it.
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = layer.mlp.up_proj.weight[:, 0] = 1e25
    return model


def test_a_prompt_that_overflows_fails_alone(engine):
    model = overflow_at(engine.learner, OVERFLOWING)
    engine.send(model)
    prompts = make_prompts(40, seed=13)
    params = [SamplingParams(1 + index % 9, 0) for index in range(40)]
    engine.generate(prompts[:1], params[:1])
    overflowing = [np.full(length, OVERFLOWING) for length in (1, 40, 90, 150)]
    for _ in range(3):
        results = engine.generate([*overflowing, *prompts], [*seeded(4, 5), *params])
        for error in results[:4]:
            assert isinstance(error, EngineError)
            assert "the prompt overflows, because" in str(error)
        assert_logprobs_of(model, prompts, results[4:])


def test_weights_that_overflow_are_named_and_can_be_replaced(engine):
    broken = copy.deepcopy(engine.learner)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[3] = torch.nan
    version = engine.send(broken)
    prompts, params = make_prompts(20, seed=14), seeded(20, 4)
    errors = engine.generate(prompts, params)
    assert {type(error) for error in errors} == {EngineError}
    assert f"weights of version {version} have answered no other" in str(errors[0])
    engine.send(engine.learner)
    assert_logprobs_of(engine.learner, prompts, engine.generate(prompts, params))


def test_weights_other_than_those_sent_are_never_served(engine, monkeypatch):
    """Tensors that were exchanged, replaced or lost, a transfer that broke off, and those of another policy."""
    monkeypatch.setattr("trial_ray.engines.weights.SHARD_BYTES", 40_000)
    model = copy.deepcopy(engine.learner)
    randomise(model)
    other = dict(model.named_parameters())
    sent = pack_weights(other.items(), next(VERSIONS))
    half = sent.refs[: len(sent.refs) // 2]
    assert len(half) > 1
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    changes = ({first: other[second], second: other[first]}, {first: other[second]})
    changed = [pack_weights((other | change).items(), sent.version).refs for change in changes]
    received = [replace(sent, refs=refs) for refs in (*changed, half, [*half, ray.put("no shard")])]
    received.append(pack_weights([(first, other[first])], sent.version))
    received.append(replace(sent, text=text_of(engine.learner)))
    prompts, params = make_prompts(4, seed=9), seeded(4, 4, temperature=0)
    for weights in received:
        with pytest.raises((EngineError, WeightSyncError), match="Engine 0"):
            engine.pool.sync(weights)
        assert engine.call("weight_version") == -1
    assert {type(error) for error in engine.generate(prompts, params)} == {EngineError}
    engine.pool.sync(sent)
    assert_logprobs_of(model, prompts, engine.generate(prompts, params))


def test_vllm_sleeps_only_if_it_was_started_for_it(engine):
    if engine.name != "vllm":
        pytest.skip("this test is about vLLM on the CPU")

    def allow_sleep(actor, allowed):
        actor._arguments["enable_sleep_mode"] = allowed

    def sleeps_after(method, *arguments):
        engine.call(method, *arguments)
        return engine.call("__ray_call__", lambda actor: actor._engine.is_sleeping())

    with pytest.raises(ConfigError):
        engine.call("sleep")
    engine.call("__ray_call__", allow_sleep, True)
    assert sleeps_after("sleep")
    assert sleeps_after("wake", "weights")
    assert not sleeps_after("wake", "cache")
    engine.call("__ray_call__", allow_sleep, False)

"""What every engine promises, held against transformers' own forward pass over the same ids."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import ray
import torch

from trial_ray.engines import weights as weights_module
from trial_ray.engines.client import EngineClient
from trial_ray.engines.pool import EnginePool
from trial_ray.engines.protocol import SamplingParams
from trial_ray.engines.weights import TextLogprobs, own_logprobs, pack_weights
from trial_ray.errors import ConfigError, EngineError, WeightSyncError

pytestmark = pytest.mark.actors

VOCAB_SIZE, STOP_IDS = 300, [7, 8]  # of the tiny model in conftest
MAX_MODEL_LEN = 160
# Fields of vLLM's own arguments, of other values than this package's or vLLM's defaults.
VLLM_ARGUMENTS = {"max_num_batched_tokens": 4096, "max_num_seqs": 15, "num_gpu_blocks_override": 400}
VERSIONS = itertools.count(1)
TEXT = np.arange(200, 240, dtype=np.int32)  # begins no prompt of the tests


@dataclass
class Engine:
    """One running engine and the learner's model whose weights it was given."""

    name: str
    pool: EnginePool
    client: EngineClient
    info: dict
    refusal: Exception
    learner: torch.nn.Module

    def send(self, model: torch.nn.Module) -> int:
        version = next(VERSIONS)
        self.pool.sync(pack_weights(model.named_parameters(), version, text=self.text_of(model)))
        return version

    def text_of(self, model):
        return TextLogprobs(TEXT, own_logprobs(model, TEXT), 1e-4, "Qwen3ForCausalLM")

    def ask(self, prompts, params):
        async def everything():
            return await asyncio.gather(
                *[self.client.generate(prompt, p, 0) for prompt, p in zip(prompts, params, strict=True)]
            )

        return asyncio.run(everything())


def load_learner(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


ON_CUDA = {"dtype": "float32", "block_size": 32}
ENGINES = {
    "transformers": {"max_batch": 16},
    "vllm": VLLM_ARGUMENTS,
    "vllm on CUDA": ON_CUDA,
    "vllm on CUDA, with its fall-backs": {**ON_CUDA, "v2_model_runner": False, "async_scheduling": False},
}
MARKS = {"vllm": [pytest.mark.vllm, pytest.mark.timeout(1800)], "CUDA": [pytest.mark.gpu]}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[mark for part, marks in MARKS.items() if part in name for mark in marks])
        for name in ENGINES
    ],
)
def started(request, ray_session, tiny_qwen3):
    on_cuda = "CUDA" in request.param
    if on_cuda and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    pool = EnginePool(
        engine=request.param.split()[0],
        model_path=str(tiny_qwen3),
        num_engines=1,
        engine_kwargs={"max_model_len": MAX_MODEL_LEN, "num_threads": 1, **ENGINES[request.param]},
        num_cpus_per_engine=0.2,
        num_gpus_per_engine=float(on_cuda),
    )
    try:
        [info] = pool.start(timeout_s=500)
        client = EngineClient(pool.handles, timeout_s=120)
        with pytest.raises(EngineError) as refusal:
            asyncio.run(client.generate(np.array([1, 2, 3]), SamplingParams(max_tokens=2), 0))
        yield request.param, pool, client, info, refusal.value
    finally:
        pool.stop()


@pytest.fixture
def engine(started, tiny_qwen3):
    """The engine of this module, with the weights on disk loaded once more."""
    running = Engine(*started, load_learner(tiny_qwen3))
    running.send(running.learner)
    return running


def make_prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(10, VOCAB_SIZE, rng.integers(3, 100)).astype(np.int32) for _ in range(count)]


def reference_logits(model, prompt, response):
    """float32 ``[y, V]``: what the learner's model says at every position of the response."""
    ids = torch.as_tensor(np.concatenate([prompt, response.response_ids]), dtype=torch.long)[None]
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].float()


def assert_logprobs_of(model, prompts, responses, tolerance=1e-4, temperature=1.0, top_p=1.0):
    """``responses`` report, to ``tolerance`` nats, the distribution that ``model`` was sampled from (float64)."""
    for prompt, response in zip(prompts, responses, strict=True):
        scaled = reference_logits(model, prompt, response).double() / temperature
        logprobs = torch.log_softmax(truncated(scaled, top_p), -1)
        expected = logprobs.gather(-1, torch.tensor(response.response_ids, dtype=torch.long)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.logprobs), expected.float(), atol=tolerance, rtol=0)


def truncated(logits, top_p):
    """``[y, V]`` with everything outside the nucleus at minus infinity."""
    ordered, index = logits.sort(dim=-1, descending=True)
    before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)
    return torch.full_like(logits, -torch.inf).scatter(-1, index, ordered.masked_fill(before >= top_p, -torch.inf))


def perturbed(model, tiny_qwen3, seed):
    torch.manual_seed(seed)
    other = load_learner(tiny_qwen3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return other


def test_ready_tells_vocabulary_and_stop_tokens_and_nothing_is_sampled_before_weights_came(engine):
    assert (engine.info["vocab_size"], engine.info["stop_token_ids"]) == (VOCAB_SIZE, STOP_IDS)
    assert "no weights" in str(engine.refusal)


def test_each_request_of_a_mixed_batch_reports_its_own_distribution(engine):
    """There are more of them than rows."""
    kinds = [(0.0, 1.0), (0.0, 0.5), (0.7, 1.0), (0.7, 0.9), (1.0, 1.0), (1.0, 0.3), (1.3, 1.0), (1.3, 0.8)] * 5
    prompts = [*make_prompts(len(kinds) - 1, seed=12), np.full(MAX_MODEL_LEN - 6, 11, np.int32)]  # fills the context
    params = [
        SamplingParams(max_tokens=6, temperature=temperature, top_p=top_p, seed=seed)
        for seed, (temperature, top_p) in enumerate(kinds)
    ]
    for prompt, response, (temperature, top_p) in zip(prompts, engine.ask(prompts, params), kinds, strict=True):
        assert (response.response_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
        asked = {"temperature": temperature, "top_p": top_p} if temperature else {}  # greedy: the model as it is
        # On CUDA vLLM searches where a nucleus ends, and may keep a token too many if two have nearly the same probability.
        tolerance = 1e-2 if "CUDA" in engine.name and top_p < 1 else 1e-4
        assert_logprobs_of(engine.learner, [prompt], [response], tolerance, **asked)
        if not temperature:
            most = reference_logits(engine.learner, prompt, response).log_softmax(-1).max(-1).values
            torch.testing.assert_close(torch.tensor(response.logprobs), most, atol=1e-4, rtol=0)


def test_any_sampled_stop_token_ends_the_response_and_belongs_to_it(engine):
    embedding = engine.learner.model.embed_tokens.weight
    with torch.no_grad():  # a stop token's logit is now among the largest wherever it is positive
        for stop in STOP_IDS:
            embedding[stop] *= 3
    engine.send(engine.learner)
    prompts = make_prompts(32)
    responses = engine.ask(prompts, [SamplingParams(max_tokens=12, seed=seed) for seed in range(32)])
    assert_logprobs_of(engine.learner, prompts, responses)
    ends = {response.response_ids[-1] for response in responses if response.finish_reason == "stop"}
    assert ends == {*STOP_IDS}
    for response in responses:
        stopped = response.finish_reason == "stop"
        assert not np.isin(response.response_ids[: -1 if stopped else None], STOP_IDS).any()


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine):
    prompts, params = make_prompts(4, seed=5), [SamplingParams(max_tokens=12, seed=seed) for seed in range(4)]
    whole = engine.ask(prompts, params)
    stops = []
    for response in whole:
        *_, last, next_to_it = response.response_ids[:5]
        stops.append((f"{last}><{next_to_it}", "never said"))
    for most in (12, 5):  # at the limit it has not been cut
        cut = engine.ask(
            prompts,
            [dataclasses.replace(each, max_tokens=most, stop=stop) for each, stop in zip(params, stops, strict=True)],
        )
        for response, full in zip(cut, whole, strict=True):
            assert (response.response_ids.tolist(), response.finish_reason) == (full.response_ids[:5].tolist(), "stop")
            np.testing.assert_allclose(response.logprobs, full.logprobs[:5], atol=1e-4)
    [again] = engine.ask(prompts[:1], [dataclasses.replace(params[0], stop=("never said",))])
    assert again.response_ids.tolist() == whole[0].response_ids.tolist()


def test_an_engine_counts_what_it_has_done(engine):
    """tests/e2e/test_training.py holds the counts against those of env runners."""
    [handle] = engine.pool.handles
    before = ray.get(handle.report.remote(), timeout=60)
    for _ in range(2):
        engine.ask([np.arange(20, 110, dtype=np.int32)], [SamplingParams(max_tokens=3, temperature=0)])
    after = ray.get(handle.report.remote(), timeout=60)
    assert after["prompt_tokens"] - before["prompt_tokens"] == 2 * 90
    assert after["busy_seconds"] > before["busy_seconds"]
    if engine.info["engine"] == "vllm":  # whole blocks of 32 tokens of the second prompt were there
        assert after["cached_tokens"] - (before["cached_tokens"] or 0) == 64


def test_a_seed_repeats_its_response_alone_and_in_company(engine):
    prompts = make_prompts(10, seed=3)
    params = [SamplingParams(max_tokens=6, seed=100 + index) for index in range(10)]
    together = engine.ask(prompts, params)
    alone = [engine.ask([prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    assert [r.response_ids.tolist() for r in together] == [r.response_ids.tolist() for r in alone]
    others = engine.ask(prompts[:1] * 16, [SamplingParams(max_tokens=6, seed=seed) for seed in range(16)])
    assert len({tuple(response.response_ids.tolist()) for response in others}) > 8


def test_new_weights_change_responses_and_nothing_cached_of_the_old_ones_is_used(engine, tiny_qwen3):
    prompts = make_prompts(8, seed=4)
    greedy = [SamplingParams(max_tokens=6, temperature=0)] * 8
    before = engine.ask(prompts, greedy)
    other = perturbed(engine.learner, tiny_qwen3, seed=5)
    version = engine.send(other)  # also compares checksums
    after = engine.ask(prompts, greedy)
    assert_logprobs_of(other, prompts, after)
    assert {response.weight_version for response in after} == {version}
    assert [r.response_ids.tolist() for r in before] != [r.response_ids.tolist() for r in after]
    engine.send(engine.learner)
    back = engine.ask(prompts, greedy)
    assert [r.response_ids.tolist() for r in before] == [r.response_ids.tolist() for r in back]


def test_an_update_amid_responses_never_mixes_two_versions_in_one(engine, tiny_qwen3):
    other = perturbed(engine.learner, tiny_qwen3, seed=6)
    models = {engine.send(engine.learner): engine.learner}
    new = next(VERSIONS)
    models[new] = other
    shards = pack_weights(other.named_parameters(), new)
    prompts = make_prompts(60, seed=7)

    async def responses_around_an_update():
        params = SamplingParams(max_tokens=20, seed=1)
        first = dataclasses.replace(params, max_tokens=1)  # once it has ended, the others are under way
        early = [engine.client.generate(p, first if p is prompts[0] else params, 0) for p in prompts[:30]]
        early = [asyncio.ensure_future(request) for request in early]
        await early[0]
        update = engine.pool.handles[0].load_weights.remote(shards)
        late = [engine.client.generate(p, params, 0) for p in prompts[30:]]
        responses = await asyncio.gather(*early, *late)
        await update
        return responses

    responses = asyncio.run(responses_around_an_update())
    for prompt, response in zip(prompts, responses, strict=True):
        assert_logprobs_of(models[response.weight_version], [prompt], [response])
    assert responses[0].weight_version != new
    assert responses[-1].weight_version == new


def test_abandoned_requests_are_sampled_no_further(engine):
    """They would hold back new weights, and take the place of requests that are waited for."""
    [handle] = engine.pool.handles
    engine.send(engine.learner)
    before = ray.get(handle.report.remote(), timeout=60)["response_tokens"]
    long = SamplingParams(max_tokens=60, seed=1, temperature=2.0)

    async def abandon_all_but_one():
        requests = [asyncio.ensure_future(engine.client.generate(p, long, 0)) for p in make_prompts(20, seed=8)]
        await engine.client.generate(make_prompts(1, seed=9)[0], dataclasses.replace(long, max_tokens=1), 0)
        for request in requests[1:]:
            request.cancel()
        await asyncio.wait(requests)
        return requests[0].result()

    response = asyncio.run(abandon_all_but_one())
    version = engine.send(engine.learner)  # waits for running responses
    tokens = ray.get(handle.report.remote(), timeout=60)["response_tokens"] - before
    assert tokens == 1 + len(response.response_ids)
    [again] = engine.ask(make_prompts(1, seed=8), [long])
    assert again.response_ids.tolist() == response.response_ids.tolist()
    assert again.weight_version == version


OVERFLOWING = 11


def overflow_at(model: torch.nn.Module, token: int) -> torch.nn.Module:
    """Make finite weights under which one token's activations overflow in any dtype, and all others' are ordinary numbers.

    Only the token's embedding has a first component; the first layer's feed-forward network multiplies it beyond all bounds.
    """
    layer, embedding = model.model.layers[0], model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, 0] = 0
        embedding[token] = 0
        embedding[token, 0] = 1
        model.model.norm.weight[0] = 0  # its logit is 0, so that no greedy response holds it
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.gate_proj.weight[:, 0] = layer.mlp.up_proj.weight[:, 0] = 1e25
    return model


def without_overflow(prompts):
    return [np.where(prompt == OVERFLOWING, OVERFLOWING + 1, prompt) for prompt in prompts]


def test_a_prompt_that_overflows_fails_alone_with_its_reason_and_leaves_nothing_behind(engine):
    model = overflow_at(engine.learner, OVERFLOWING)
    engine.send(model)
    prompts = without_overflow(make_prompts(40, seed=13))
    params = [SamplingParams(max_tokens=1 + index % 9, temperature=0) for index in range(40)]
    engine.ask(prompts[:1], params[:1])
    bad = [np.full(length, OVERFLOWING, np.int32) for length in (1, 40, 90, 150)]

    async def mixed():
        asked = [engine.client.generate(prompt, p, 0) for prompt, p in zip(prompts, params, strict=True)]
        doomed = [engine.client.generate(prompt, SamplingParams(max_tokens=5), 0) for prompt in bad]
        return await asyncio.gather(*doomed, *asked, return_exceptions=True)

    for _ in range(3):
        found = asyncio.run(mixed())
        for error, prompt in zip(found[:4], bad, strict=True):
            assert isinstance(error, EngineError)
            assert f"prompt of {len(prompt)} tokens" in str(error)
            assert "dtype" in str(error)
            assert "lower lr" not in str(error)
        failed = [error for error in found[4:] if isinstance(error, BaseException)]
        assert not failed
        assert_logprobs_of(model, prompts, found[4:])


def test_weights_that_give_no_probabilities_are_named_and_those_after_them_serve(engine, tiny_qwen3):
    broken = load_learner(tiny_qwen3)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[3] = torch.nan
    version = engine.send(broken)
    prompts, params = make_prompts(20, seed=14), [SamplingParams(max_tokens=4, seed=3)] * 20

    async def all_fail():
        asked = [engine.client.generate(prompt, p, 0) for prompt, p in zip(prompts, params, strict=True)]
        return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(all_fail()):
        assert isinstance(error, EngineError)
        assert f"weights of version {version}" in str(error)
        assert "lower lr" in str(error)
    engine.send(engine.learner)
    assert_logprobs_of(engine.learner, prompts, engine.ask(prompts, params))


def test_weights_other_than_those_sent_are_never_served(engine, tiny_qwen3):
    other = dict(perturbed(engine.learner, tiny_qwen3, seed=15).named_parameters())
    sent = pack_weights(other.items(), next(VERSIONS))
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    square = "model.layers.0.self_attn.q_norm.weight"
    swapped, flipped = {first: other[second], second: other[first]}, {square: other[square].flip(0)}
    for lie, told in (
        (swapped, "names and places"),
        (flipped, "names and places"),
        ({first: other[second]}, "checksum"),
    ):
        received = pack_weights((other | lie).items(), sent.version)
        with pytest.raises(WeightSyncError, match=f"Engine 0.*{told}"):
            engine.pool.sync(dataclasses.replace(sent, refs=received.refs))
        assert ray.get(engine.pool.handles[0].weight_version.remote(), timeout=60) == -1
    with pytest.raises(WeightSyncError, match=r"Engine 0.*another policy.*Qwen3ForCausalLM"):
        engine.pool.sync(dataclasses.replace(sent, text=engine.text_of(engine.learner)))
    engine.pool.sync(sent)


def test_a_transfer_that_is_cut_leaves_no_engine_with_a_mixture_and_a_whole_one_heals_it(
    engine, tiny_qwen3, monkeypatch
):
    monkeypatch.setattr(weights_module, "SHARD_BYTES", 40_000)
    other = perturbed(engine.learner, tiny_qwen3, seed=9)
    whole = pack_weights(other.named_parameters(), next(VERSIONS))
    half = whole.refs[: len(whole.refs) // 2]
    assert len(half) > 1
    for refs in (half, [*half, ray.put("no shard")]):  # too few, or broken off
        with pytest.raises((EngineError, WeightSyncError), match="failed to load weights"):
            engine.pool.sync(dataclasses.replace(whole, refs=refs))
    assert ray.get(engine.pool.handles[0].weight_version.remote(), timeout=60) == -1
    prompts, greedy = make_prompts(4, seed=9), [SamplingParams(max_tokens=4, temperature=0)] * 4
    with pytest.raises(EngineError, match="has no weights"):
        engine.ask(prompts, greedy)
    engine.pool.sync(whole)
    assert_logprobs_of(other, prompts, engine.ask(prompts, greedy))


def test_an_engine_has_no_process_that_could_outlive_its_actor(engine):
    assert psutil.Process(engine.info["pid"]).children(recursive=True) == []


def test_arguments_of_vllm_arrive_and_go_before_the_engines_own(engine):
    def settings_inside(actor):
        import torch._dynamo

        config = actor._engine.vllm_config
        return {
            "compiles": not torch._dynamo.config.disable,
            **{name: getattr(config.scheduler_config, name) for name in ("max_num_batched_tokens", "max_num_seqs")},
            "num_gpu_blocks_override": config.cache_config.num_gpu_blocks,
            "logprobs_mode": config.model_config.logprobs_mode,
            "dtype": str(config.model_config.dtype),
        }

    if engine.name != "vllm":
        pytest.skip("of vLLM alone")
    assert ray.get(engine.pool.handles[0].__ray_call__.remote(settings_inside), timeout=60) == {
        "compiles": False,  # eager execution is the default on a CPU, and vLLM's sampler would be compiled all the same
        **VLLM_ARGUMENTS,
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
    }


def test_vllm_sleeps_through_both_parts_only_where_it_was_started_to(engine):
    """Its CPU worker keeps the memory; the rest of it does as on a GPU."""
    if engine.name != "vllm":
        pytest.skip("of vLLM alone; how the transformers engine sleeps is in test_engine_pool")
    handle = engine.pool.handles[0]

    def may_sleep(actor, allowed):
        actor._arguments["enable_sleep_mode"] = allowed

    def sleeping_after(call):
        ray.get(call, timeout=60)
        return ray.get(handle.__ray_call__.remote(lambda actor: actor._engine.is_sleeping()), timeout=60)

    with pytest.raises(ConfigError, match="cannot sleep"):
        ray.get(handle.sleep.remote(), timeout=60)
    ray.get(handle.__ray_call__.remote(may_sleep, allowed=True), timeout=60)
    assert sleeping_after(handle.sleep.remote())
    assert sleeping_after(handle.wake.remote("weights"))
    assert not sleeping_after(handle.wake.remote("cache"))
    ray.get(handle.__ray_call__.remote(may_sleep, allowed=False), timeout=60)

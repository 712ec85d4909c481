"""Padded and two-branch batches give the numbers of separate, unpadded forward passes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trial_ray.learner.packing import OrdinaryBatch, Row, TwoViewBatch, can_pack_views, make_buckets, score_rows

VOCABULARY = 83
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family="qwen3", dtype=torch.float64, attention="sdpa", **settings):
    torch.manual_seed(3)
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation=attention,
        **settings,
    )
    return model_class(config).to(dtype).eval()


def random_ids(generator, length):
    return generator.integers(0, VOCABULARY, length).astype(np.int32)


def random_rows(count=9, seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        prompt = random_ids(generator, generator.integers(1, 20))
        insert_at = int(generator.integers(1, len(prompt) + 1))
        response, evidence = (random_ids(generator, generator.integers(low, 7)) for low in (1, 0))
        rows.append(Row(prompt, insert_at, response, evidence))
    # The corners: no evidence; nothing after the evidence; neither; a response of one token; nearly everything after it.
    prompt, response, evidence = (random_ids(generator, length) for length in (6, 4, 5))
    rows += [
        Row(prompt, 3, response),
        Row(prompt, 6, response, evidence),
        Row(prompt, 6, response),
        Row(prompt, 6, response[:1]),
        Row(prompt, 4, response[:1], evidence[:1]),
        Row(prompt[:1], 1, response, evidence),
    ]
    return rows


def separate_forwards(lm, rows):
    """Each row alone, unpadded, through the model's own forward, from ids put together by hand."""
    ordinary, hindsight = [], []
    for row in rows:
        prompt = row.prompt_ids.tolist()
        with_evidence = prompt[: row.insert_at] + row.evidence_ids.tolist() + prompt[row.insert_at :]
        for context, out in ((prompt, ordinary), (with_evidence, hindsight)):
            ids = torch.tensor([context + row.response_ids.tolist()])
            with torch.no_grad():
                logs = torch.log_softmax(lm(ids).logits[0], -1)
            response = torch.arange(len(context), ids.shape[1])
            out.append(logs[response - 1, ids[0, response]])
    return torch.cat(ordinary), torch.cat(hindsight)


@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    # Eager attention takes its softmax in float32 whatever the model's dtype.
    [("sdpa", torch.float64, 1e-10), ("sdpa", torch.float32, 1e-5), ("eager", torch.float64, 1e-5)],
)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_views_equal_two_separate_unpadded_forwards(family, attention, dtype, tolerance):
    lm, rows = tiny_model(family, dtype, attention), random_rows()
    assert can_pack_views(lm)
    ordinary, hindsight = score_rows(lm, rows, two_views=True, max_tokens=200)
    exact = separate_forwards(lm, rows)
    torch.testing.assert_close(ordinary, exact[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(hindsight, exact[1], atol=tolerance, rtol=0)
    assert (ordinary - hindsight).abs().max() > 0.1, "the evidence must matter, or the test proves nothing"


def test_ordinary_view_alone_is_the_same_and_uses_no_mask(monkeypatch):
    lm, rows = tiny_model(), random_rows()
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        masks.append((kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    logprobs, none = score_rows(lm, rows, two_views=False, max_tokens=100)
    monkeypatch.undo()
    assert none is None
    assert set(masks) == {(None, True)}, "padding on the right must keep the fast causal kernel"
    torch.testing.assert_close(logprobs, separate_forwards(lm, rows)[0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("two_views", [False, True])
def test_bucket_size_and_row_order_do_not_change_the_result(two_views):
    lm, rows = tiny_model(), random_rows()
    whole = score_rows(lm, rows, two_views=two_views, max_tokens=10_000)
    order = np.random.default_rng(1).permutation(len(rows))
    lengths = np.array([len(row.response_ids) for row in rows])
    starts = np.cumsum(lengths) - lengths
    places = np.concatenate([np.arange(starts[index], starts[index] + lengths[index]) for index in order])
    for max_tokens in (1, 60, 150):
        parts = score_rows(lm, [rows[index] for index in order], two_views=two_views, max_tokens=max_tokens)
        for part, all_at_once in zip(parts, whole, strict=True):
            if all_at_once is not None:
                torch.testing.assert_close(part, all_at_once[places], atol=1e-10, rtol=0)


def test_models_with_sliding_layers_are_scored_in_two_plain_passes():
    lm = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert not can_pack_views(lm)
    rows = random_rows()
    ordinary, hindsight = score_rows(lm, rows, two_views=True, max_tokens=100)
    exact = separate_forwards(lm, rows)
    torch.testing.assert_close(ordinary, exact[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(hindsight, exact[1], atol=1e-10, rtol=0)


def test_both_views_score_the_identical_response_tokens():
    rows = random_rows()
    batch = TwoViewBatch.from_rows(rows)
    responses = torch.from_numpy(np.concatenate([row.response_ids for row in rows])).long()
    assert torch.equal(batch.targets, responses)
    assert torch.equal(OrdinaryBatch.from_rows(rows).targets, responses)
    # Where a predecessor is a response token, it is the same token in both views.
    ordinary = batch.input_ids[batch.rows, batch.positions]
    hindsight = batch.input_ids[batch.rows, batch.hindsight_positions]
    inside = torch.cat([torch.arange(len(row.response_ids)) > 0 for row in rows])
    assert torch.equal(ordinary[inside], hindsight[inside])
    assert torch.equal(ordinary[inside], responses[:-1][inside[1:]])


def test_packed_length_is_prefix_plus_two_branches():
    row = Row(np.arange(30, dtype=np.int32), 25, np.arange(4, dtype=np.int32), np.arange(7, dtype=np.int32))
    assert row.length == 30 + 3
    assert row.two_view_length == 25 + 2 * (5 + 3) + 7
    assert TwoViewBatch.from_rows([row]).input_ids.shape == (1, row.two_view_length)


@pytest.mark.parametrize("insert_at", [0, 4, -1])
def test_an_insertion_point_outside_the_prompt_is_refused(insert_at):
    with pytest.raises(ValueError, match="insert_at"):
        Row(np.arange(3, dtype=np.int32), insert_at, np.arange(2, dtype=np.int32))


def test_no_rows_give_no_tokens():
    logprobs, hindsight = score_rows(tiny_model(), [], two_views=True, max_tokens=10)
    assert logprobs.shape == hindsight.shape == (0,)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_buckets_hold_every_row_once_within_the_budget(lengths, budget):
    buckets = make_buckets(lengths, budget)
    assert sorted(np.concatenate(buckets).tolist() if buckets else []) == list(range(len(lengths)))
    for bucket in buckets:
        padded = len(bucket) * max(lengths[index] for index in bucket)
        assert padded <= budget or len(bucket) == 1

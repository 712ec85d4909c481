"""Rows packed together give the numbers of separate, unpadded forward passes."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trial_ray.learner.packing import Row, score_rows
from trial_ray.models import layout, tree_attention

VOCABULARY = 83
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family="qwen3", dtype=torch.float64, attention="sdpa", **settings):
    tree_attention.register()
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
        insert_at = int(generator.integers(0, len(prompt) + 1))
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
        Row(prompt, 0, response, evidence),
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
    [
        ("sdpa", torch.float64, 1e-10),
        ("sdpa", torch.float32, 1e-5),
        (tree_attention.IMPLEMENTATION, torch.float64, 1e-10),
        (tree_attention.IMPLEMENTATION, torch.float32, 1e-5),
        ("eager", torch.float64, 1e-5),
    ],
)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_views_equal_two_separate_unpadded_forwards(family, attention, dtype, tolerance):
    lm, rows = tiny_model(family, dtype, attention), random_rows()
    assert layout.layout_of(lm).rows == "tree"
    ordinary, hindsight = score_rows(lm, rows, max_tokens=200)
    exact = separate_forwards(lm, rows)
    torch.testing.assert_close(ordinary, exact[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(hindsight, exact[1], atol=tolerance, rtol=0)
    assert (ordinary - hindsight).abs().max() > 0.1, "the evidence must matter, or the test proves nothing"


def test_bucket_size_and_row_order_do_not_change_the_result():
    lm, rows = tiny_model(), random_rows()
    whole = score_rows(lm, rows, max_tokens=10_000)
    order = np.random.default_rng(1).permutation(len(rows))
    lengths = np.array([len(row.response_ids) for row in rows])
    starts = np.cumsum(lengths) - lengths
    places = np.concatenate([np.arange(starts[index], starts[index] + lengths[index]) for index in order])
    for max_tokens in (1, 60, 150):
        parts = score_rows(lm, [rows[index] for index in order], max_tokens=max_tokens)
        for part, all_at_once in zip(parts, whole, strict=True):
            torch.testing.assert_close(part, all_at_once[places], atol=1e-10, rtol=0)


def test_models_with_sliding_layers_are_scored_in_padded_rows_and_that_is_said(caplog):
    layout._measured.cache_clear()  # other tests may have heard it
    lm = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert layout.layout_of(lm).rows == "padded"
    rows = random_rows()
    found = score_rows(lm, rows, max_tokens=100)
    for one, other in zip(found, separate_forwards(lm, rows), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)
    score_rows(lm, rows, max_tokens=100)
    assert caplog.text.count("are padded") == 1


@pytest.mark.parametrize("insert_at", [4, -1])
def test_an_insertion_point_outside_the_prompt_is_refused(insert_at):
    with pytest.raises(ValueError, match="insert_at"):
        Row(np.arange(3, dtype=np.int32), insert_at, np.arange(2, dtype=np.int32))


def test_no_rows_give_no_tokens():
    logprobs, hindsight = score_rows(tiny_model(), [], max_tokens=10)
    assert logprobs.shape == hindsight.shape == (0,)

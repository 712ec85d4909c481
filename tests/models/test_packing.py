"""Rows packed together give the numbers of separate, unpadded forward passes."""

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model
from scored_rows import Row, score_rows

from trial_ray.models import layout, tree_attention


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


@pytest.mark.parametrize("attention", ["sdpa", tree_attention.IMPLEMENTATION])
def test_packed_views_in_any_order_and_cut_equal_separate_unpadded_forwards(attention):
    """tests/models/test_layout.py has the architectures."""
    tree_attention.register()
    lm, rows = random_model("qwen2", torch.float64, attn_implementation=attention), random_rows()
    assert layout.layout_of(lm).rows == "tree"
    rows = [rows[index] for index in np.random.default_rng(1).permutation(len(rows))]
    exact = separate_forwards(lm, rows)
    for max_tokens in (1, 60, 200, 10_000):
        for found, expected in zip(score_rows(lm, rows, max_tokens=max_tokens), exact, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (exact[0] - exact[1]).abs().max() > 0.1, "the evidence must matter, or the test proves nothing"


def test_models_with_sliding_layers_are_scored_in_padded_rows_and_that_is_said(caplog):
    layout._measured.clear()  # other tests may have heard it
    lm = random_model("mistral", torch.float64)
    assert layout.layout_of(lm).rows == "padded"
    rows = random_rows()
    found = score_rows(lm, rows, max_tokens=100)
    for one, other in zip(found, separate_forwards(lm, rows), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    score_rows(lm, rows, max_tokens=100)
    assert caplog.text.count("are padded") == 1


@pytest.mark.parametrize("insert_at", [4, -1])
def test_an_insertion_point_outside_the_prompt_is_refused(insert_at):
    with pytest.raises(ValueError, match="insert_at"):
        Row(np.arange(3, dtype=np.int32), insert_at, np.arange(2, dtype=np.int32)).view(hindsight=True)


def test_no_rows_give_no_tokens():
    logprobs, hindsight = score_rows(random_model("qwen2"), [], max_tokens=10)
    assert logprobs.shape == hindsight.shape == (0,)

"""Rows packed together get the log-probabilities of separate, unpadded forward passes."""

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model
from scored_rows import Row, own_scores, score_rows

from trial_ray.models import layout, tree_attention


def random_rows():
    generator = np.random.default_rng(0)

    def ids(length):
        return generator.integers(0, VOCABULARY, length).astype(np.int32)

    rows = []
    for _ in range(9):
        prompt = ids(generator.integers(1, 20))
        insert_at = int(generator.integers(0, len(prompt) + 1))
        rows.append(Row(prompt, insert_at, ids(generator.integers(1, 7)), ids(generator.integers(0, 7))))
    # Edge cases: no evidence, nothing after it, neither, a response of one token, and nearly all tokens after the evidence.
    prompt, response, evidence = map(ids, (6, 4, 5))
    rows += [
        Row(prompt, 3, response),
        Row(prompt, 6, response, evidence),
        Row(prompt, 6, response),
        Row(prompt, 6, response[:1]),
        Row(prompt, 4, response[:1], evidence[:1]),
        Row(prompt[:1], 1, response, evidence),
        Row(prompt, 0, response, evidence),
    ]
    return [rows[index] for index in generator.permutation(len(rows))]


@pytest.mark.parametrize(
    ("name", "attention", "kind"),
    [("qwen2", "sdpa", "tree"), ("qwen2", tree_attention.register(), "tree"), ("mistral", "sdpa", "padded")],
)
def test_packed_rows_of_any_cut_equal_separate_forwards(name, attention, kind):
    lm, rows = random_model(name, torch.float64, attn_implementation=attention), random_rows()
    assert layout.layout_of(lm).rows == kind
    exact = own_scores(lm, rows)
    for max_tokens in (1, 60, 200, 10_000):
        torch.testing.assert_close(score_rows(lm, rows, max_tokens), exact, atol=1e-6, rtol=0)
    assert (exact[0] - exact[1]).abs().max() > 0.1  # the evidence has an effect


def test_padding_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(layout, "_measured", {})
    for _ in range(2):
        layout.layout_of(random_model("mistral"))
    assert caplog.text.count("are padded") == 1


@pytest.mark.parametrize("insert_at", [4, -1])
def test_an_insertion_point_outside_the_prompt_is_refused(insert_at):
    with pytest.raises(ValueError, match="insert_at"):
        Row(np.arange(3, dtype=np.int32), insert_at, np.arange(2, dtype=np.int32)).view(hindsight=True)


def test_no_rows_give_no_tokens():
    assert score_rows(random_model("qwen2"), [], max_tokens=10).shape == (2, 0)

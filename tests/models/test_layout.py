"""The layout of each architecture: rows packed together have the scores of transformers' own model."""

from itertools import product

import numpy as np
import pytest
import torch
from architectures import VOCABULARY, config_of, random_model, save_model
from rejections import misconfigured
from scored_rows import Row, own_scores, score_rows
from transformers import AutoModelForCausalLM

from trial_ray.models import tree_attention
from trial_ray.models.layout import layout_of, measured_layout
from trial_ray.models.loading import fill, load_causal_lm
from trial_ray.models.module import checkpoint_layers

ROWS = {
    "llama": "tree", "gpt2": "tree", "glm4-moe": "tree", "granite": "tree", "codegen": "tree", "gpt-j": "tree",
    "gpt-oss": "padded", "gemma2": "padded", "gemma4": "padded", "mistral": "padded", "cohere2": "padded", "bloom": "padded",
    "falcon-alibi": "padded", "llama4": "padded", "recurrentgemma": "padded", "qwen3-next": "padded", "mamba": "padded",
    "phi3-longrope": "one length",
}  # fmt: skip
"""One architecture for each reason."""


SIZES = (
    (25, 12, 5, 6), (29, 3, 6, 2), (18, 18, 2, 1), (3, 1, 6, 6), (12, 7, 3, 4),
    # Edge cases: no evidence, nothing after it, neither, a response of one token, and nearly all tokens after the evidence.
    (6, 3, 4, 0), (6, 6, 4, 5), (6, 6, 4, 0), (6, 6, 1, 0), (6, 4, 1, 1), (1, 1, 4, 5), (6, 0, 4, 5),
)  # fmt: skip
"""Tokens of prompts, where evidence is inserted, tokens of responses and of evidence; some rows exceed every window below."""


def random_rows():
    """Turns of these sizes, whose prompts have the beginning in common."""

    def ids(length):
        return np.random.randint(3, VOCABULARY, length, np.int32)

    common = ids(30)
    return [
        Row(np.concatenate((common[: prompt // 2], ids(prompt - prompt // 2))), insert_at, ids(response), ids(evidence))
        for prompt, insert_at, response, evidence in SIZES
    ]


def test_no_rows_give_no_tokens_and_evidence_is_inside_its_prompt():
    assert score_rows(random_model("qwen2"), [], max_tokens=10).shape == (2, 0)
    for insert_at in (4, -1):
        with pytest.raises(ValueError, match="insert_at"):
            Row(np.arange(3), insert_at, np.arange(2)).view(hindsight=True)


@pytest.mark.parametrize("name", ROWS)
def test_scores_are_those_of_transformers_own_model(name, tmp_path, monkeypatch):
    folder, rows = save_model(name, tmp_path), random_rows()
    lm = load_causal_lm(folder, "float32", weights=False)
    fill(lm, folder, torch.device("cpu"))
    # Eager attention is the model's own code; SDPA ignores options that it does not support, such as a cap of the scores.
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = own_scores(stock, rows)
    for max_tokens, min_segment in product((1, 60, 1000), (tree_attention.MIN_SEGMENT, 0)):
        monkeypatch.setattr(tree_attention, "MIN_SEGMENT", min_segment)
        torch.testing.assert_close(score_rows(lm, rows, max_tokens), expected, atol=1e-4, rtol=0)
    assert (expected[0] - expected[1]).abs().max() > 0.01  # the evidence has an effect
    assert layout_of(lm).rows == ROWS[name]


def test_a_model_without_a_correct_layout_is_refused(tmp_path):
    misconfigured("rows scored before", load_causal_lm, save_model("llama-dynamic-rope", tmp_path), "float32")


def test_measuring_leaves_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    measured_layout(config_of("smollm3"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mixtral", "gpt-oss", "deepseek-v3", "falcon-h1"])
def test_checkpointing_makes_no_model_random(name):
    """Training mode would enable dropout and a router's noise; gradients are those without checkpointing."""
    lm = random_model(name)

    def gradients():
        logits = lm(input_ids=torch.arange(3, 23)[None], use_cache=False).logits
        return logits, torch.autograd.grad(logits.log_softmax(-1)[0, :, 5].sum(), lm.parameters(), allow_unused=True)

    plain, expected = gradients()
    checkpoint_layers(lm)
    for _ in range(2):
        logits, checkpointed = gradients()
        assert torch.equal(logits, plain)
        torch.testing.assert_close(checkpointed, expected, atol=1e-6, rtol=1e-5)

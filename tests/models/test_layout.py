"""The layout of each architecture: its scores are those of transformers' own model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, config_of, random_model, save_model
from scored_rows import Row, own_scores, score_rows
from transformers import AutoModelForCausalLM

from trial_ray.errors import ConfigError
from trial_ray.models.layout import layout_of, measured_layout
from trial_ray.models.loading import fill, load_causal_lm
from trial_ray.models.module import checkpoint_layers

REFUSED = "llama-dynamic-rope"
ROWS = {
    "llama": "tree", "gpt2": "tree", "glm4-moe": "tree", "granite": "tree", "codegen": "tree", "gpt-j": "tree",
    "gpt-oss": "padded", "gemma2": "padded", "gemma4": "padded", "mistral": "padded", "cohere2": "padded", "bloom": "padded",
    "falcon-alibi": "padded", "llama4": "padded", "recurrentgemma": "padded", "qwen3-next": "padded", "mamba": "padded",
    "phi3-longrope": "one length",
}  # fmt: skip
"""One architecture for each reason."""


def rows_with_forks() -> list[Row]:
    """Turns of unequal length, in both contexts, that share beginnings; some longer than every window of the table."""
    generator = np.random.default_rng(3)
    ids = generator.integers(3, VOCABULARY, (8, 40)).astype(np.int32)
    ids[1, :9], ids[2, :14], ids[3] = ids[0, :9], ids[0, :14], ids[0]
    ids[3, 29] = (ids[0, 29] + 1) % VOCABULARY  # another last token
    lengths = [30, 25, 30, 30, 12, 8, 20, 30]
    return [
        Row(row[: n - 6], (n - 6) // 2, row[n - 6 : n], row[30 : 30 + n % 7])
        for row, n in zip(ids, lengths, strict=True)
    ]


@pytest.mark.parametrize("name", ROWS)
def test_scores_are_those_of_transformers_own_model(name, tmp_path):
    folder, rows = save_model(name, tmp_path), rows_with_forks()
    lm = load_causal_lm(folder, "float32", weights=False)
    fill(lm, folder, torch.device("cpu"))
    # Eager attention is the model's own code; SDPA ignores options that it does not support, such as a cap of the scores.
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = own_scores(stock, rows)
    separate = torch.cat([score_rows(lm, [row], max_tokens=1000) for row in rows], 1)
    for scores in (score_rows(lm, rows, max_tokens=1000), separate):
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    assert (expected[0] - expected[1]).abs().max() > 0.01  # the teacher context has an effect
    assert layout_of(lm).rows == ROWS[name]


def test_a_model_without_a_correct_layout_is_refused(tmp_path):
    folder = save_model(REFUSED, tmp_path)
    for weights in (False, True):
        with pytest.raises(ConfigError, match="rows scored before"):
            load_causal_lm(folder, "float32", weights=weights)


def test_measuring_leaves_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    measured_layout(config_of("smollm3"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpointing_makes_no_model_random(name):
    """Training mode would enable dropout and a router's noise; gradients are those without checkpointing."""
    lm = random_model(name)
    ids = torch.arange(3, 23)[None]

    def gradients():
        lm.zero_grad()
        logits = lm(input_ids=ids, use_cache=False).logits
        logits.log_softmax(-1)[0, :, 5].sum().backward()
        return logits.detach(), [tensor.grad.clone() for tensor in lm.parameters() if tensor.grad is not None]

    plain, expected = gradients()
    try:
        checkpoint_layers(lm)
    except ConfigError:
        return
    for _ in range(2):
        logits, checkpointed = gradients()
        assert torch.equal(logits, plain)
        torch.testing.assert_close(checkpointed, expected, atol=1e-6, rtol=1e-5)
    assert not any(module.training for module in lm.modules() if not list(module.children()))

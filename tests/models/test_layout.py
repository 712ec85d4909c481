"""How rows of each architecture are laid out: loaded as the learner loads it, its scores are those of transformers' own model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCABULARY, config_of, random_model, save_model
from scored_rows import Row, score_rows
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


def own_scores(lm, rows: list[Row], hindsight: bool) -> torch.Tensor:
    """Each response alone, by the model's own forward pass."""
    scores = []
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(row.view(hindsight).ids).long()
            logs = lm(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
            scores.append(logs.gather(-1, ids[1:, None])[-len(row.response_ids) :, 0])
    return torch.cat(scores)


@pytest.mark.parametrize("name", ROWS)
def test_scores_are_those_of_transformers_own_model(name, tmp_path):
    folder = save_model(name, tmp_path)
    lm = load_causal_lm(folder, "float32", weights=False)
    fill(lm, folder, torch.device("cpu"))
    # What the model's code says: SDPA leaves out what it does not know, such as a cap of the scores.
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = rows_with_forks()
    expected = [own_scores(stock, rows, hindsight) for hindsight in (False, True)]
    together = score_rows(lm, rows, max_tokens=1000)
    alone = [torch.cat(each) for each in zip(*(score_rows(lm, [row], max_tokens=1000) for row in rows), strict=True)]
    differences = [
        max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))
        for found in (together, alone)
    ]
    assert max(differences) < 1e-4
    assert (expected[0] - expected[1]).abs().max() > 0.01, "the context must matter, or the test proves nothing"
    assert layout_of(lm).rows == ROWS[name]


def test_a_model_that_no_layout_scores_rightly_is_refused_with_what_differs(tmp_path):
    folder = save_model(REFUSED, tmp_path)
    for weights in (False, True):
        with pytest.raises(ConfigError, match="depend on the rows scored before"):
            load_causal_lm(folder, "float32", weights=weights)


def test_measuring_leaves_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    measured_layout(config_of("smollm3"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpointing_makes_no_model_random(name):
    """Dropout 0.1, the noise of a router: what training mode would switch on stays off, and gradients are those without it."""
    lm = random_model(name)
    ids = torch.arange(3, 23)[None]

    def gradients():
        lm.zero_grad()
        logits = lm(input_ids=ids, use_cache=False).logits
        logits.log_softmax(-1)[0, :, 5].sum().backward()
        return logits.detach(), [each.grad.clone() for each in lm.parameters() if each.grad is not None]

    plain, expected = gradients()
    try:
        checkpoint_layers(lm)
    except ConfigError:
        return
    for _ in range(2):
        logits, found = gradients()
        assert torch.equal(logits, plain)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert not any(module.training for module in lm.modules() if not list(module.children()))

"""The transformers engine's sampler: log-probabilities are those of the distribution that was sampled from."""

from __future__ import annotations

import pytest
import torch

from trial_ray.engines.transformers import sample_tokens

VOCAB = 50


def draw(logits, temperatures, top_ps, seed=0):
    uniforms = torch.rand(len(logits), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return sample_tokens(logits, torch.tensor(temperatures), torch.tensor(top_ps), uniforms)


def random_logits(rows, seed=0):
    return 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def expected(row, token, temperature, top_p):
    """float64, from the definition: the smallest set of most probable tokens whose mass reaches top_p, renormalised."""
    probs = torch.softmax(row.double() / temperature, -1)
    mass, nucleus = 0.0, []
    for index in probs.argsort(descending=True).tolist():
        nucleus.append(index)
        mass += float(probs[index])
        if mass >= top_p:
            break
    assert token in nucleus
    return float((probs[token] / probs[nucleus].sum()).log())


@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_of_the_tempered_and_truncated_distribution(temperature, top_p, dtype):
    logits = random_logits(64).to(dtype)
    tokens, logprobs = draw(logits, [temperature] * 64, [top_p] * 64)
    assert logprobs.dtype == torch.float32
    for row, token, logprob in zip(logits, tokens.tolist(), logprobs.tolist(), strict=True):
        assert logprob == pytest.approx(expected(row, token, temperature, top_p), abs=1e-6)


def test_greedy_rows_report_the_untempered_model_alone_and_among_others():
    logits = random_logits(6)
    alone, alone_logprobs = draw(logits, [0.0] * 6, [0.5] * 6)
    mixed, mixed_logprobs = draw(logits, [0.0, 0.7, 0.0, 1.3, 0.0, 1.0], [0.5, 0.5, 1.0, 1.0, 0.9, 0.2])
    untempered = torch.log_softmax(logits.double(), -1).max(-1).values.float()
    assert torch.equal(alone, logits.argmax(-1))
    assert torch.allclose(alone_logprobs, untempered, atol=1e-6)
    greedy = [0, 2, 4]
    assert torch.equal(mixed[greedy], alone[greedy])
    assert torch.allclose(mixed_logprobs[greedy], untempered[greedy], atol=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 0.8)])
def test_tokens_come_as_often_as_their_logprobs_say(temperature, top_p):
    count = 20_000
    row = random_logits(1, seed=3)
    tokens, logprobs = draw(row.expand(count, -1), [temperature] * count, [top_p] * count)
    for token in tokens.unique().tolist():
        drawn = tokens == token
        probability = float(logprobs[drawn][0].exp())
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(float(drawn.double().mean()) - probability) < 5 * deviation

"""Chunked log-probabilities and divergences against whole logits in float64."""

import copy
import weakref

import numpy as np
import pytest
import torch
from architectures import random_model
from torch import nn

from trial_ray.models.logprobs import (
    TransformingHead,
    gather_divergence,
    gather_logprobs,
    output_head,
    sequence_logprobs,
)
from trial_ray.models.prefix_tree import PrefixOrder, ScoredSequence, pack_trees
from trial_ray.objectives.divergences import generalised_jsd


def problem(tokens=23, hidden=16, vocabulary=57, dtype=torch.float32):
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    nn.init.normal_(head.weight)
    return torch.randn(tokens, hidden, dtype=dtype), head, torch.randint(vocabulary, (tokens,))


@pytest.mark.parametrize(
    ("precision", "chunk_tokens", "temperature"),
    [("float32", 7, 0.7), ("float32", 1000, 0.7), ("bfloat16", 64, 1.0), ("autocast", 64, 1.0)],
)
def test_values_and_gradients_equal_a_float64_softmax(precision, chunk_tokens, temperature):
    """A bfloat16 head rounds its inputs and no logit: values are those of float64 products of the rounded numbers."""
    states, head, targets = problem(tokens=100, hidden=64, vocabulary=300)
    states.requires_grad_()
    given, rounded = states, torch.float32 if precision == "float32" else torch.bfloat16
    if precision == "bfloat16":
        given, head = states.bfloat16(), head.bfloat16()
    exact = [tensor.detach().to(rounded).double().requires_grad_() for tensor in (states, head.weight)]
    temperatures = torch.linspace(temperature, 1.0, 100, dtype=torch.float64)
    logs = torch.log_softmax(exact[0] @ exact[1].T / temperatures[:, None], -1)
    expected = torch.stack((logs[torch.arange(100), targets], -(logs.exp() * logs).sum(-1)))
    divisors = temperatures if temperature < 1 else None
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        found = torch.stack(
            gather_logprobs(given, head, targets, divisors, chunk_tokens=chunk_tokens, second="entropy")
        )
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs().mean(1).max() < 1e-5
    coefficients = torch.randn_like(expected)
    for values in (found, expected):
        values.double().backward(coefficients)
    for ours, theirs in zip((states.grad, head.weight.grad), exact, strict=True):
        assert (ours.double() - theirs.grad).norm() < (1e-5 if precision == "float32" else 5e-3) * theirs.grad.norm()


def test_at_most_a_chunk_of_logits_is_in_memory():
    states, head, targets = problem()
    seen = []
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[0]))
    logprobs, _ = gather_logprobs(states, head, targets, chunk_tokens=5)
    assert seen == [5, 5, 5, 5, 3]
    logprobs.sum().backward()
    assert max(seen) == 5


def test_empty_input_keeps_parameters_in_the_graph():
    states, head, targets = problem()
    logprobs, entropy = gather_logprobs(states[:0], head, targets[:0], second="entropy")
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not head.weight.grad.any()


def test_divergence_in_chunks_is_that_of_all_logits():
    """The teacher's head gets no gradient, even if it is the policy's."""
    (hidden, head, _), (teacher, *_) = (problem(dtype=torch.float64) for _ in range(2))
    gradients = []
    for teacher_head in (head, copy.deepcopy(head)):
        head.weight.grad = None
        found = gather_divergence(hidden, head, teacher, teacher_head, mix=0.3, temperature=1.1, chunk_tokens=4)
        found.sum().backward()
        gradients.append(head.weight.grad)
    assert torch.allclose(found, generalised_jsd(head(hidden), head(teacher), 0.3, 1.1), rtol=1e-12)
    assert teacher_head.weight.grad is None
    assert torch.equal(*gradients)


@torch.no_grad()
def test_scoring_keeps_the_hidden_states_of_one_pack_at_a_time():
    """Otherwise its memory would grow with the number of rows."""
    lm = random_model("llama", torch.float64)
    rows = [ScoredSequence(np.arange(1, 9) + row, 3) for row in range(12)]
    packed = pack_trees(PrefixOrder(rows), 16)
    output_head(lm)  # measured once, with a given output of the decoder
    alive, counts = [], []

    def note(module, arguments, outputs):
        alive.append(weakref.ref(outputs.last_hidden_state))
        counts.append(sum(tensor() is not None for tensor in alive))

    lm.get_decoder().register_forward_hook(note)
    sequence_logprobs(lm, packed)
    assert counts == [1] * 6


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere2", "recurrentgemma"])
def test_gradients_of_transformed_logits(name):
    """``test_layout.py`` compares the values with those of the model."""
    lm = random_model(name, torch.float64)
    head, layer = output_head(lm), lm.get_output_embeddings()
    assert isinstance(head, TransformingHead)
    states = torch.randn(5, layer.in_features, dtype=torch.float64, requires_grad=True)

    def score(hidden, _):
        return gather_logprobs(hidden, head, torch.arange(5), chunk_tokens=2)[0]

    assert torch.autograd.gradcheck(score, (states, layer.weight), fast_mode=True)
    assert "forward" not in {*vars(layer), *vars(lm.get_decoder())}  # the model is restored

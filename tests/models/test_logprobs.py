"""Chunked log-probabilities and divergences against whole logits in float64."""

import copy
import weakref
from functools import partial

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


def problem(tokens=23, hidden=16, vocabulary=57, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=generator, dtype=dtype)
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, hidden, generator=generator, dtype=dtype))
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    coefficients = torch.randn(tokens, generator=generator, dtype=torch.float64)
    return states, head, targets, coefficients


def reference(states, weight, targets, temperature):
    logs = torch.log_softmax(states.double() @ weight.double().T / temperature, dim=-1)
    return logs[torch.arange(len(targets)), targets], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_a_float64_softmax(chunk_tokens, temperature):
    states, head, targets, coefficients = problem()
    exact_states, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (states, head.weight))
    states.requires_grad_()
    options = {"temperature": temperature, "chunk_tokens": chunk_tokens, "with_entropy": True}
    values = gather_logprobs(states, head, targets, **options)
    exact_values = reference(exact_states, exact_weight, targets, temperature)
    for logprobs, entropy in (values, exact_values):
        (logprobs.double() @ coefficients + entropy.double() @ coefficients.flip(0)).backward()
    gradients, exact_gradients = (states.grad, head.weight.grad), (exact_states.grad, exact_weight.grad)
    close = partial(torch.testing.assert_close, check_dtype=False)
    close(values, tuple(value.detach() for value in exact_values), atol=1e-5, rtol=1e-5)
    close(gradients, exact_gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_bfloat16_head_rounds_its_inputs_and_no_logit(autocast):
    """Values are those of float64 products of the rounded numbers; the plain layer's are a hundred times less exact."""
    states, head, targets, coefficients = problem(tokens=200, hidden=64, vocabulary=500, dtype=torch.float32)
    states, head = states.requires_grad_(), head if autocast else head.to(torch.bfloat16)
    rounded = [tensor.detach().bfloat16().double().requires_grad_() for tensor in (states, head.weight)]
    exact, exact_entropy = reference(*rounded, targets, 1.0)
    (exact @ coefficients + exact_entropy.sum()).backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = states if autocast else states.bfloat16()
        logprobs, entropy = gather_logprobs(given, head, targets, chunk_tokens=64, with_entropy=True)
        plain = torch.log_softmax(head(given).float(), -1)[torch.arange(len(targets)), targets]
    (logprobs.double() @ coefficients + entropy.double().sum()).backward()
    error, plain_error = ((values.double() - exact).abs().mean().item() for values in (logprobs, plain))
    assert logprobs.dtype == torch.float32
    assert error < 1e-5 < 1e-3 < plain_error
    for ours, theirs in zip((states.grad, head.weight.grad), rounded, strict=True):
        assert (ours.double() - theirs.grad).norm() < 5e-3 * theirs.grad.norm()


def test_at_most_a_chunk_of_logits_is_in_memory():
    states, head, targets, _ = problem()
    seen, kept = [], []
    head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[0]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        logprobs, _ = gather_logprobs(states, head, targets, chunk_tokens=5)
    assert seen == [5, 5, 5, 5, 3]
    assert max(kept, default=0) < 5 * head.out_features or max(kept) == head.weight.numel()
    logprobs.sum().backward()
    assert max(seen) == 5


def test_empty_input_keeps_parameters_in_the_graph():
    states, head, targets, _ = problem()
    logprobs, entropy = gather_logprobs(states[:0], head, targets[:0], with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_the_teachers_head_gets_no_gradient():
    (hidden, head, *_), (teacher, teacher_head, *_) = (problem(dtype=torch.float64, seed=seed) for seed in (0, 1))
    hidden.requires_grad_()
    gather_divergence(hidden, head, teacher, teacher_head, mix=0.5, temperature=1.0, chunk_tokens=4).sum().backward()
    assert teacher_head.weight.grad is None
    gradients = []
    for other in (head, copy.deepcopy(head)):
        value = gather_divergence(hidden, head, teacher, other, mix=0.5, temperature=1.0)
        gradients.append(torch.autograd.grad(value.sum(), head.weight)[0])
    assert torch.equal(*gradients)
    assert not torch.equal(gradients[0], head.weight.grad)


@torch.no_grad()
def test_scoring_keeps_the_hidden_states_of_one_pack_at_a_time():
    """Otherwise its memory would grow with the number of rows."""
    lm = random_model("llama", torch.float64)
    rows = [ScoredSequence(np.arange(1, 9, dtype=np.int32) + row, 3) for row in range(12)]
    packed = pack_trees(PrefixOrder(rows), 16, "cpu")
    assert len(packed.packs) == 6
    output_head(lm)  # measured once, with a given output of the decoder
    alive, counts = [], []

    def note(module, arguments, outputs):
        alive.append(weakref.ref(outputs.last_hidden_state))
        counts.append(sum(tensor() is not None for tensor in alive))

    handle = lm.get_decoder().register_forward_hook(note)
    logprobs = sequence_logprobs(lm, packed)
    handle.remove()
    assert counts == [1] * 6
    one_pack = sequence_logprobs(lm, pack_trees(PrefixOrder(rows), 96, "cpu"))
    torch.testing.assert_close(logprobs, one_pack)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma4", "granite", "cohere2", "recurrentgemma", "nanochat", "falcon-h1", "minicpm3"]
)
def test_transformed_logits_of_each_architecture(name):
    """Values and gradients of hidden states and head, in float64; the rest of the model has no effect."""
    lm = random_model(name, torch.float64)
    head, layer = output_head(lm), lm.get_output_embeddings()
    assert isinstance(head, TransformingHead)
    states, targets = torch.randn(11, layer.in_features, dtype=torch.float64), torch.arange(11)

    def results(score):
        lm.zero_grad()
        hidden = states.clone().requires_grad_()
        logprobs = score(hidden)
        (logprobs * torch.linspace(-1, 2, 11, dtype=torch.float64)).sum().backward()
        return logprobs.detach(), hidden.grad, layer.weight.grad.clone()

    chunked = results(lambda hidden: gather_logprobs(hidden, head, targets, chunk_tokens=4)[0])
    expected = results(lambda hidden: transformed(lm.config, layer(hidden)).log_softmax(-1)[targets, targets])
    torch.testing.assert_close(chunked, expected, atol=1e-12, rtol=1e-6)
    assert "forward" not in {*vars(layer), *vars(lm.get_decoder())}  # the model is restored


def transformed(config, logits):
    """Transform logits by the settings of the architectures, none of which the package reads."""
    settings = config.to_dict()
    logits = logits * (settings.get("logit_scale") or 1.0) * (settings.get("lm_head_multiplier") or 1.0)
    logits = logits / (settings.get("logits_scaling") or 1.0)
    if base := settings.get("dim_model_base"):
        logits = logits * (base / config.hidden_size)
    cap = settings.get("final_logit_softcapping") or settings.get("logits_soft_cap")
    return cap * torch.tanh(logits / cap) if cap else logits

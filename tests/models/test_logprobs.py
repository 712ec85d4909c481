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
    states.requires_grad_()
    logprobs, entropy = gather_logprobs(
        states, head, targets, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True
    )
    (logprobs.double() @ coefficients + entropy.double() @ coefficients.flip(0)).backward()

    exact_states = states.detach().double().requires_grad_()
    exact_weight = head.weight.detach().double().requires_grad_()
    exact, exact_entropy = reference(exact_states, exact_weight, targets, temperature)
    (exact @ coefficients + exact_entropy @ coefficients.flip(0)).backward()

    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), exact_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.grad.double(), exact_states.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.weight.grad.double(), exact_weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_bfloat16_head_rounds_its_inputs_and_no_logit(autocast):
    """Values are those of float64 products of the rounded numbers; the plain layer's are a hundred times less exact."""
    states, head, targets, coefficients = problem(tokens=200, hidden=64, vocabulary=500, dtype=torch.float32)
    states, head = states.requires_grad_(), head if autocast else head.to(torch.bfloat16)
    rounded = [each.detach().bfloat16().double().requires_grad_() for each in (states, head.weight)]
    exact, exact_entropy = reference(*rounded, targets, 1.0)
    (exact @ coefficients + exact_entropy.sum()).backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = states if autocast else states.bfloat16()
        logprobs, entropy = gather_logprobs(given, head, targets, chunk_tokens=64, with_entropy=True)
        plain = torch.log_softmax(head(given).float(), -1)[torch.arange(len(targets)), targets]
    (logprobs.double() @ coefficients + entropy.double().sum()).backward()
    error, plain_error = ((each.double() - exact).abs().mean().item() for each in (logprobs, plain))
    assert logprobs.dtype == torch.float32
    assert error < 1e-5 < 1e-3 < plain_error
    for ours, theirs in zip((states.grad, head.weight.grad), rounded, strict=True):
        assert (ours.double() - theirs.grad).norm() < 5e-3 * theirs.grad.norm()


def test_no_more_than_a_chunk_of_logits_is_alive_forward_or_backward():
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


def test_the_teachers_head_gets_no_gradient_even_where_it_is_the_policys():
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
    """Else its memory grows with the number of rows."""
    lm = random_model("llama", torch.float64)
    rows = [ScoredSequence(np.arange(1, 9, dtype=np.int32) + row, 3) for row in range(12)]
    packed = pack_trees(PrefixOrder(rows), 16, "cpu")
    assert len(packed.packs) == 6
    output_head(lm)  # measured once, with a given output of the decoder
    alive, most = [], 0

    def note(module, arguments, outputs):
        nonlocal most
        alive.append(weakref.ref(outputs.last_hidden_state))
        most = max(most, sum(each() is not None for each in alive))

    handle = lm.get_decoder().register_forward_hook(note)
    logprobs = sequence_logprobs(lm, packed)
    handle.remove()
    assert (len(alive), most) == (6, 1)
    one_pack = sequence_logprobs(lm, pack_trees(PrefixOrder(rows), 96, "cpu"))
    torch.testing.assert_close(logprobs, one_pack)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma4", "granite", "cohere2", "recurrentgemma", "nanochat", "falcon-h1", "minicpm3"]
)
def test_what_a_model_does_to_its_logits_is_done_to_each_chunk_in_both_directions(name):
    """In float64, with a head's weights and hidden states that need a gradient; nothing else of the model takes part."""
    lm = random_model(name, torch.float64)
    head, layer = output_head(lm), lm.get_output_embeddings()
    assert isinstance(head, TransformingHead)
    states, targets = torch.randn(11, layer.in_features, dtype=torch.float64), torch.arange(11)
    found, expected = {}, {}
    for results, chunk_tokens in ((found, 4), (expected, 100)):
        lm.zero_grad()
        hidden = states.clone().requires_grad_()
        if results is found:
            logprobs, _ = gather_logprobs(hidden, head, targets, chunk_tokens=chunk_tokens)
        else:
            logprobs = transformed(lm.config, layer(hidden)).log_softmax(-1)[torch.arange(11), targets]
        (logprobs * torch.linspace(-1, 2, 11, dtype=torch.float64)).sum().backward()
        results.update(logprobs=logprobs.detach(), hidden=hidden.grad, weight=layer.weight.grad)
    for each, value in expected.items():
        torch.testing.assert_close(found[each], value, atol=1e-12, rtol=1e-6, msg=each)
    assert not {"forward"} & {*vars(layer), *vars(lm.get_decoder())}, "the model is left as it was"


def transformed(config, logits):
    """By the names of the settings in the papers' models, none of which the package knows."""
    settings = config.to_dict()
    logits = logits * (settings.get("logit_scale") or 1.0) * (settings.get("lm_head_multiplier") or 1.0)
    logits = logits / (settings.get("logits_scaling") or 1.0)
    if base := settings.get("dim_model_base"):
        logits = logits * (base / config.hidden_size)
    cap = settings.get("final_logit_softcapping") or settings.get("logits_soft_cap")
    return cap * torch.tanh(logits / cap) if cap else logits

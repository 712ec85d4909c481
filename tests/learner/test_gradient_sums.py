"""Gradients are added up bucket by bucket during the last backward pass, in one order, each when it is complete."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

from trial_ray.learner import exchange
from trial_ray.learner.exchange import GradientSums


@pytest.fixture
def summed(monkeypatch):
    """What was given to each sum, by a group of this process alone; buckets hold one layer's weight."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    given: list[torch.Tensor] = []
    all_reduce = distributed.all_reduce

    def noted(tensor, **kwargs):
        given.append(tensor.clone())
        return all_reduce(tensor, **kwargs)

    monkeypatch.setattr(distributed, "all_reduce", noted)
    monkeypatch.setattr(exchange, "BUCKET_ELEMENTS", 9)
    yield given
    distributed.destroy_process_group()


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))


def loss_of(layers, used=(0, 1, 2)):
    hidden = torch.arange(3.0)
    for index in used:
        hidden = layers[index](hidden)
    return hidden.square().sum()


def gradients_of(layers, *losses):
    sums = [torch.zeros(9) for _ in layers]
    for used in losses:
        found = torch.autograd.grad(loss_of(layers, used), [layers[index].weight for index in used])
        for index, gradient in zip(used, found, strict=True):
            sums[index] += gradient.reshape(-1)
    return sums


def assert_sums(summed, layers, expected):
    assert all(torch.equal(found, wanted) for found, wanted in zip(summed, reversed(expected), strict=True))
    assert all(torch.equal(each.weight.grad.reshape(-1), wanted) for each, wanted in zip(layers, expected, strict=True))


def test_gradients_of_each_dtype_are_summed_in_it(summed, layers, monkeypatch):
    """As in a model in bfloat16 whose norms stay in float32; one sum of both would give parameters gradients of another dtype."""
    monkeypatch.setattr(exchange, "BUCKET_ELEMENTS", 100)
    parameters = [layers[0].weight, layers[1].weight.data.bfloat16().requires_grad_(), layers[2].weight]
    sums = GradientSums(parameters)
    sums.begin()
    sum((index + 1) * each.float().sum() for index, each in enumerate(parameters)).backward()
    sums.finish()
    assert [each.dtype for each in summed] == [each.dtype for each in reversed(parameters)]
    for index, each in enumerate(parameters):
        assert torch.equal(each.grad, torch.full_like(each, index + 1))


def test_layers_that_the_last_pass_leaves_out_keep_their_place_in_the_order(summed, layers):
    sums = GradientSums(list(layers.parameters()))
    loss_of(layers).backward()
    sums.begin()
    loss_of(layers, (0, 2)).backward()
    assert len(summed) == 1  # the last layer's; the first one's waits for the middle one's
    sums.finish()
    assert_sums(summed, layers, gradients_of(layers, (0, 1, 2), (0, 2)))

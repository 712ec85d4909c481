"""Exchange between learners: gradients are added up bucket by bucket in one order, and lost groups are dropped by all learners."""

from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError
from torch import distributed, nn

from trial_ray.learner import exchange


@pytest.fixture
def summed(monkeypatch):
    """Return the inputs of all sums, by a process group of this process; a bucket has room for one layer's weight."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    inputs = []
    all_reduce = distributed.all_reduce

    def noted(tensor, **kwargs):
        inputs.append(tensor.clone())
        return all_reduce(tensor, **kwargs)

    monkeypatch.setattr(distributed, "all_reduce", noted)
    monkeypatch.setattr(exchange, "BUCKET_ELEMENTS", 9)
    yield inputs
    distributed.destroy_process_group()


def loss_of(weights):
    hidden = torch.arange(3.0)
    for weight in weights:
        hidden = weight @ hidden
    return hidden.square().sum()


def new_weights():
    return [nn.Parameter(torch.randn(3, 3)) for _ in range(3)]


def test_gradients_of_each_dtype_are_summed_in_it(summed, monkeypatch):
    """A bfloat16 model may have norms in float32, and every gradient must have its parameter's dtype."""
    monkeypatch.setattr(exchange, "BUCKET_ELEMENTS", 100)
    weights = new_weights()
    weights[1] = nn.Parameter(weights[1].data.bfloat16())
    sums = exchange.GradientSums(weights)
    sums.begin()
    sum((index + 1) * weight.float().sum() for index, weight in enumerate(weights)).backward()
    sums.finish()
    assert [tensor.dtype for tensor in summed] == [weight.dtype for weight in reversed(weights)]
    for index, weight in enumerate(weights):
        assert torch.equal(weight.grad, torch.full_like(weight, index + 1))


def test_layers_outside_the_last_pass_keep_their_place_in_the_order(summed):
    first, _, last = weights = new_weights()
    expected = torch.autograd.grad(loss_of(weights) + loss_of([first, last]), weights)
    sums = exchange.GradientSums(weights)
    loss_of(weights).backward()
    sums.begin()
    loss_of([first, last]).backward()
    assert len(summed) == 1  # the sum of the last layer; the first layer waits for the middle one
    sums.finish()
    for tensor, weight, gradient in zip(reversed(summed), weights, expected, strict=True):
        assert torch.equal(tensor, gradient.reshape(-1))
        assert torch.equal(weight.grad, gradient)


def test_a_group_that_one_learner_misses_is_dropped_by_all(monkeypatch):
    def get(refs, timeout):
        if "3" in refs:
            raise ObjectLostError("3", None, "")
        return [f"group {ref}" for ref in refs]

    reported = []
    others = SimpleNamespace(gather=lambda missing: [reported.append(missing) or missing, {0, 3}, set()])
    monkeypatch.setattr(ray, "get", get)
    assert exchange.fetch_groups([*"01234"], others) == ["group 1", "group 2", "group 4"]
    assert reported == [{3}]

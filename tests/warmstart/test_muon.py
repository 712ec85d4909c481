"""Muon: orthogonal updates, the same as torch's but for its bfloat16."""

from __future__ import annotations

import torch

from trial_ray.warmstart.cloning import Muon, orthogonalized

SHAPES = [(8, 8), (24, 8), (8, 24), (8, 24)]


def test_directions_stay_and_singular_values_come_near_1():
    matrices = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonalized(matrices) @ right.mT
    diagonal = torch.diagonal(found, dim1=1, dim2=2)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all(), values
    torch.testing.assert_close(found, torch.diag_embed(diagonal), atol=1e-4, rtol=0)


def test_steps_are_those_of_torchs_muon():
    generator = torch.Generator().manual_seed(0)
    ours, torchs = ([torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
    optimizers = [Muon(ours, lr=0.02), torch.optim.Muon(torchs, lr=0.02, momentum=0.95, weight_decay=0.0)]
    for _ in range(5):
        for one, other in zip(ours, torchs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_what_has_no_gradient_stays():
    matrix, other = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    matrix.grad = torch.eye(2)
    Muon([matrix, other], lr=0.1).step()
    assert not torch.equal(matrix, torch.ones(2, 2))
    assert torch.equal(other, torch.ones(2, 2))

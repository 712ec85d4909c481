"""Muon: the same updates as torch's, which computes in bfloat16."""

import torch

from trial_ray.warmstart.cloning import Muon

SHAPES = [(8, 8), (24, 8), (8, 24), (8, 24)]


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
    torch.testing.assert_close(ours, torchs, atol=2e-3, rtol=0)

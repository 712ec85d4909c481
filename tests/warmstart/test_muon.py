"""Muon: the same updates as torch's, which computes in bfloat16."""

import torch

from trial_ray.warmstart.cloning import Muon, make_optimizers
from trial_ray.warmstart.settings import WarmStartSettings


def test_steps_are_those_of_torchs_muon():
    shapes = (8, 8), (24, 8), (8, 24), (8, 24)
    ours, torchs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizers = [Muon(ours, lr=0.02), torch.optim.Muon(torchs, lr=0.02, momentum=0.95, weight_decay=0.0)]
    for _ in range(5):
        for one, other in zip(ours, torchs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, torchs, atol=2e-3, rtol=0)


def test_muon_trains_only_the_matrices_of_layers():
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    parts = {"embedding": torch.nn.Embedding(4, 4), "layers": layers}
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict(parts)})
    muon, adamw = make_optimizers(model, WarmStartSettings(optimizer="muon"))
    (matrix,) = muon.param_groups[0]["params"]
    assert matrix is layers[0].weight
    assert len(adamw.param_groups[0]["params"]) == 2

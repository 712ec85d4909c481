"""Optimizer states that are refused change nothing."""

from __future__ import annotations

import pytest
import torch

from trial_ray.errors import CheckpointError
from trial_ray.learner.state import OPTIMIZER_FILE, load_optimizers


def stepped(seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3)).sum().backward()
    made.step()
    return made


def test_a_state_that_is_damaged_in_one_optimizer_is_taken_over_by_none(tmp_path):
    states = {name: stepped(seed).state_dict() for seed, name in enumerate(("first", "second"))}
    state = states["second"]["state"][0]
    state["rtep"] = state.pop("step")
    torch.save({"sharded": False, "iteration": 7, "optimizers": states}, tmp_path / OPTIMIZER_FILE)
    into = {"first": stepped(2), "second": stepped(3)}
    before = {name: repr(optimizer.state_dict()) for name, optimizer in into.items()}
    with pytest.raises(CheckpointError, match="damaged, or of other optimizers"):
        load_optimizers(into, None, tmp_path)
    assert {name: repr(optimizer.state_dict()) for name, optimizer in into.items()} == before

"""Metrics of a microbatch's loss."""

from __future__ import annotations

import pytest
import torch

from trial_ray.algorithms import GRPOConfig
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.rows import TokenBatch


@pytest.mark.parametrize(("clips", "expected"), [((0.2, 0.5), 2), ((0.5, 0.2), 3), ((0.2, 0.2), 4)])
def test_the_clip_fraction_is_of_eligible_tokens_outside_the_bounds(clips, expected):
    """Clip-higher has another bound above than below."""
    ratios = torch.tensor([0.7, 1.0, 1.3, 1.3, 1.6, 9.0], dtype=torch.float64)
    config = GRPOConfig().training(clip_low=clips[0], clip_high=clips[1])
    mask = torch.tensor([True] * 5 + [False])
    turns = torch.zeros(6, dtype=torch.int64)
    zeros = torch.zeros_like(ratios)
    tokens = TokenBatch(zeros, zeros, mask, turns, turns[:1])
    outputs = {"logprobs": ratios.log(), "entropy": zeros}
    logged = microbatch_loss(Method(config), config, tokens, outputs, 1)[1]
    assert logged["grpo/clip_fraction"].item() == pytest.approx(expected / 5)

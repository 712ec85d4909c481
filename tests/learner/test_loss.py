"""The loss of microbatches: its clip fraction, and weights of rows that do not depend on masked rows beside them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_learners import gradients, learner_of, worst
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.learner.loss import microbatch_loss
from trial_ray.learner.method import Method
from trial_ray.learner.rows import TokenBatch, TurnRows
from trial_ray.learner.update_plan import plan_update
from trial_ray.objectives import SURROGATE_MEANS
from trial_ray.trajectory import Turn

CONFIGS = {
    mean: GRPOConfig().training(surrogate_mean=mean, ref_kl_coeff=0.1, entropy_coeff=0.1) for mean in SURROGATE_MEANS
}


def rows_of(lengths: list[int], mask: list[bool], advantages: list[float], importance: list[float]) -> TurnRows:
    """Return rows whose tokens have random log-probabilities; a row is masked and weighted as a whole."""
    turns = [Turn(response_ids=np.zeros(length, np.int32)) for length in lengths]
    rows = TurnRows(turns, torch.arange(len(turns)), torch.tensor(advantages, dtype=torch.float64))
    generator = torch.Generator().manual_seed(len(turns))
    rows.logprobs, rows.reference_logprobs = -torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64)
    rows.mask = torch.tensor(mask)[rows.turn_ids]
    rows.importance_weights = torch.tensor(importance, dtype=torch.float64)[rows.turn_ids]
    return rows


def row_gradients(rows: TurnRows, mean: str, microbatch_rows: int, num_learners: int = 1) -> list[list[float]]:
    """Return the gradient of a step's loss with respect to each row's log-probabilities and entropies, summed over tokens."""
    config = CONFIGS[mean]
    sizes = {"minibatch_rows": len(rows), "microbatch_rows": microbatch_rows, "batch_shards": 1}
    plan = plan_update([[1]] * len(rows), num_learners=num_learners, **sizes)
    outputs = {"logprobs": 0.9 * rows.logprobs, "entropy": torch.ones_like(rows.logprobs)}
    outputs = {name: value.requires_grad_() for name, value in outputs.items()}
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in plan.weighted_by(rows.eligible()).steps[0]:
        part = {name: value[rows.token_positions(microbatch.rows)] for name, value in outputs.items()}
        tokens = TokenBatch.from_rows(rows, microbatch.rows, "cpu")
        total = total + microbatch.weight * microbatch_loss(Method(config), config, tokens, part, 1)[0]
    zeros = torch.zeros(len(rows), dtype=torch.float64)
    token_gradients = torch.autograd.grad(total, list(outputs.values()))
    return [zeros.index_add(0, rows.turn_ids, gradient).tolist() for gradient in token_gradients]


ROW = st.tuples(st.integers(1, 5), st.booleans(), st.floats(-2, 2), st.sampled_from([0.0, 1.0, 1.5]))


@pytest.mark.parametrize("mean", SURROGATE_MEANS)
@given(st.lists(ROW, min_size=1, max_size=24), st.integers(1, 24), st.integers(1, 3))
def test_a_rows_gradient_does_not_depend_on_its_microbatch(mean, drawn, microbatch_rows, num_learners):
    """A token mean weights rows by their length, so all rows have the same length there; KL and entropy are token means."""
    lengths, *columns = map(list, zip(*drawn, strict=True))
    rows = rows_of([3] * len(lengths) if mean == "tokens" else lengths, *columns)
    if mean != "tokens":
        rows.reference_logprobs = None
    whole = row_gradients(rows, mean, len(rows))
    cut = row_gradients(rows, mean, min(microbatch_rows, len(rows)), num_learners)
    for name in range(2 if mean == "tokens" else 1):
        assert cut[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-14)


def test_equal_rows_weigh_the_same_beside_masked_rows():
    rows = rows_of([4] * 8, [True, False, False, False, *[True] * 4], [1.5, *[-0.5] * 3] * 2, [1.0] * 8)
    rows.logprobs = rows.reference_logprobs = torch.zeros_like(rows.logprobs)
    of_logprobs, _ = row_gradients(rows, "tokens", 4)
    assert of_logprobs[0] == of_logprobs[4] == pytest.approx(-1.5 / 5)
    assert of_logprobs[1:4] == [0.0] * 3


@pytest.mark.parametrize(("method", "mean"), [("trial", "tokens"), ("grpo", "rows"), ("grpo", "fixed_length")])
def test_truncated_responses_leave_a_step_independent_of_microbatch_rows(method, mean, exact_model_path):
    responses = [np.arange(first, first + 4, dtype=np.int32) for first in (20, 30)]
    groups = synthetic_groups(responses=responses)
    for trajectory in groups[0].trajectories[1:] + groups[1].trajectories[:1]:
        trajectory.turns = [dataclasses.replace(turn, finish_reason="length") for turn in trajectory.turns]
    shared = {"minibatch_rows": 1000, "batch_shards": 1, "grad_clip": None, "model_dtype": "float64"}
    shared |= {"surrogate_mean": mean, "entropy_coeff": 0.1}
    if method == "trial":
        shared |= {"hindsight_start_iteration": 1, "hindsight_coeff": 0.5, "clamp_alpha": float("inf")}

    def step(microbatch_rows: int, mask_truncated: bool = True) -> dict[str, torch.Tensor]:
        own = {"microbatch_rows": microbatch_rows, "mask_truncated": mask_truncated}
        return gradients(learner_of(method, exact_model_path, **shared, **own), groups)

    whole = step(1000)
    assert max(worst(step(rows), whole) for rows in (1, 3)) < 1e-12
    assert worst(step(3, mask_truncated=False), whole) > 1e-3


@pytest.mark.parametrize(("clips", "expected"), [((0.2, 0.5), 2), ((0.5, 0.2), 3), ((0.2, 0.2), 4)])
def test_clip_fraction_is_of_eligible_tokens_outside_the_bounds(clips, expected):
    ratios = torch.tensor([0.7, 1.0, 1.3, 1.3, 1.6, 9.0], dtype=torch.float64)
    config = GRPOConfig().training(clip_low=clips[0], clip_high=clips[1])
    zeros, turns = torch.zeros_like(ratios), torch.zeros(6, dtype=torch.int64)
    tokens = TokenBatch(zeros, zeros, torch.tensor([True] * 5 + [False]), turns, turns[:1])
    outputs = {"logprobs": ratios.log(), "entropy": zeros}
    _, metrics = microbatch_loss(Method(config), config, tokens, outputs, 1)
    assert metrics["grpo/clip_fraction"].item() == pytest.approx(expected / 5)

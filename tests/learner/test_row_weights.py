"""The weight of a row in a step: rows that a mask leaves out change nothing for the other rows of their microbatch."""

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
from trial_ray.objectives.choices import SURROGATE_MEANS
from trial_ray.trajectory import Turn

CONFIGS = {
    mean: GRPOConfig().training(surrogate_mean=mean, ref_kl_coeff=0.1, entropy_coeff=0.1) for mean in SURROGATE_MEANS
}
means = pytest.mark.parametrize("mean", SURROGATE_MEANS)


def rows_of(lengths: list[int], mask: list[bool], advantages: list[float], importance: list[float]) -> TurnRows:
    """Rows whose tokens have random log-probabilities; a row is masked and weighted as a whole."""
    turns = [Turn(response_ids=np.zeros(length, np.int32)) for length in lengths]
    rows = TurnRows(turns, torch.arange(len(turns)), torch.tensor(advantages, dtype=torch.float64))
    generator = torch.Generator().manual_seed(len(turns))
    draw = lambda: -torch.rand(sum(lengths), generator=generator, dtype=torch.float64)  # noqa: E731
    rows.logprobs, rows.reference_logprobs = draw(), draw()
    rows.mask = torch.tensor(mask)[rows.turn_ids]
    rows.importance_weights = torch.tensor(importance, dtype=torch.float64)[rows.turn_ids]
    return rows


def row_gradients(rows: TurnRows, mean: str, microbatch_rows: int, num_learners: int = 1) -> list[list[float]]:
    """Gradient of a step's loss with respect to each row's log-probabilities and entropies, summed over its tokens."""
    config, method = CONFIGS[mean], Method(CONFIGS[mean])
    plan = plan_update(
        [[1]] * len(rows),
        minibatch_rows=len(rows),
        microbatch_rows=microbatch_rows,
        num_learners=num_learners,
        batch_shards=1,
    )
    outputs = {
        "logprobs": (0.9 * rows.logprobs).requires_grad_(),
        "entropy": torch.ones_like(rows.logprobs).requires_grad_(),
    }
    total = torch.zeros((), dtype=torch.float64)
    for each in plan.weighted_by(rows.eligible()).steps[0]:
        own = {name: value[rows.token_positions(each.rows)] for name, value in outputs.items()}
        total = (
            total
            + each.weight * microbatch_loss(method, config, TokenBatch.from_rows(rows, each.rows, "cpu"), own, 1)[0]
        )
    found = torch.autograd.grad(total, list(outputs.values()))
    return [torch.zeros(len(rows), dtype=torch.float64).index_add(0, rows.turn_ids, each).tolist() for each in found]


ROW = st.tuples(st.integers(1, 5), st.booleans(), st.floats(-2, 2), st.sampled_from([0.0, 1.0, 1.5]))


@means
@given(st.lists(ROW, min_size=1, max_size=24), st.integers(1, 24), st.integers(1, 3))
def test_a_rows_gradient_does_not_depend_on_its_microbatch(mean, drawn, microbatch_rows, num_learners):
    """A token mean weighs rows by their length relative to the others, so its rows are equally long here."""
    lengths, *columns = map(list, zip(*drawn, strict=True))
    rows = rows_of([3] * len(lengths) if mean == "tokens" else lengths, *columns)
    rows.reference_logprobs = rows.reference_logprobs if mean == "tokens" else None
    entropy = slice(None) if mean == "tokens" else slice(1)  # the other terms are token means throughout
    whole = row_gradients(rows, mean, len(rows))[entropy]
    cut = row_gradients(rows, mean, min(microbatch_rows, len(rows)), num_learners)[entropy]
    for found, expected in zip(cut, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_winners_weigh_the_same_where_three_rows_of_one_group_are_cut():
    rows = rows_of([4] * 8, [True, False, False, False, *[True] * 4], [1.5, *[-0.5] * 3] * 2, [1.0] * 8)
    rows.logprobs = rows.reference_logprobs = torch.zeros_like(rows.logprobs)
    of_logprobs = row_gradients(rows, "tokens", 4)[0]
    assert of_logprobs[0] == of_logprobs[4] == pytest.approx(-1.5 / 5)
    assert of_logprobs[1:4] == [0.0] * 3


@pytest.mark.parametrize(("method", "mean"), [("trial", "tokens"), ("grpo", "rows"), ("grpo", "fixed_length")])
def test_cut_responses_leave_a_step_independent_of_microbatch_rows(method, mean, exact_model_path):
    groups = synthetic_groups(
        vocab_size=400, responses=[np.arange(20, 24, dtype=np.int32), np.arange(30, 34, dtype=np.int32)]
    )
    for trajectory in groups[0].trajectories[1:] + groups[1].trajectories[:1]:
        trajectory.turns = [dataclasses.replace(turn, finish_reason="length") for turn in trajectory.turns]
    own = (
        {"hindsight_start_iteration": 1, "hindsight_coeff": 0.5, "clamp_alpha": float("inf")}
        if method == "trial"
        else {}
    )

    def step(microbatch_rows: int, **changed) -> dict[str, torch.Tensor]:
        shared = {"minibatch_rows": 1000, "batch_shards": 1, "grad_clip": None, "model_dtype": "float64"}
        training = {"surrogate_mean": mean, "mask_truncated": True, "entropy_coeff": 0.1, **own, **changed}
        learner = learner_of(method, exact_model_path, microbatch_rows=microbatch_rows, **shared, **training)
        return gradients(learner, groups)

    whole = step(1000)
    assert max(worst(step(rows), whole) for rows in (1, 3)) < 1e-12
    assert worst(step(3, mask_truncated=False), whole) > 1e-3

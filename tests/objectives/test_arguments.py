"""All objectives name wrong arguments, keep dtypes, and give a gradient to at most one argument."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from trial_ray.objectives import advantages, allocation, divergences, importance, losses, shaping

LOSSES = [
    losses.clipped_surrogate,
    losses.dense_hindsight_loss,
    losses.weighted_likelihood_loss,
    divergences.k3_divergence,
]
TOKEN_LOSSES = [losses.clipped_losses, losses.cispo_losses, losses.sapo_losses]
CONSTANTS = [
    importance.importance_weights,
    advantages.group_relative_advantages,
    advantages.penalised_advantages,
    advantages.rescaled_advantages,
    advantages.discounted_returns,
    advantages.batch_standardised,
    shaping.teacher_gates,
    shaping.scaled_terms,
    shaping.term_bounds,
    allocation.hindsight_gap,
    allocation.turn_scores,
    allocation.relative_weights,
    allocation.uniform_weights,
    allocation.permuted_weights,
]
NUMBERS = {
    "cap": 2.0,
    "strength": 0.5,
    "discount": 0.9,
    "num_turns": 2,
    "coefficient": 0.1,
    "alpha": 1.0,
    "bound": 0.2,
} | {
    "mean": "rows",
    "length": 3,
}
OUT_OF_RANGE = {
    losses.clipped_surrogate: {"clip_low": -0.1, "clip_high": -0.1, "dual_clip": 1.0},
    importance.importance_weights: {"cap": 0.5},
    losses.cispo_losses: {"clip_low": 1.1, "clip_high": -0.1},
    losses.sapo_losses: {"temperatures": (1.0, 0.0)},
    advantages.penalised_advantages: {"estimator": "mean"},
    shaping.teacher_gates: {"slope": -0.1},
    shaping.scaled_terms: {"epsilon": 0.0},
    shaping.term_bounds: {"bound": 0.0, "epsilon": 0.0},
    losses.joint_loss: {"coefficient": -0.1, "alpha": -1.0},
    advantages.group_relative_advantages: {"epsilon": 0.0},
    advantages.rescaled_advantages: {"strength": -0.1, "clip": 1.5},
    advantages.discounted_returns: {"discount": 1.5},
    allocation.hindsight_gap: {"clip": 0.0},
    divergences.generalised_jsd: {"mix": 1.5, "temperature": 0.0},
    losses.surrogate_mean: {"mean": "turns", "length": 0},
}
FLOAT, IDS, ZERO_ONE, COUNTS = "float", "ids", "mask", "counts"
WRONG = {
    FLOAT: [torch.tensor([0.1, math.nan]), torch.ones(2).long(), torch.ones(2).half()],
    IDS: [torch.tensor([0, -1]), torch.zeros(2)],
    ZERO_ONE: [torch.full((2,), 0.5), torch.full((2,), 2)],
    COUNTS: [torch.full((2,), 0.5), -torch.ones(2)],
}


def kind(name: str) -> str:
    return IDS if name.endswith("_ids") else name if name in (ZERO_ONE, COUNTS) else FLOAT


def valid(function, dtype=torch.float32) -> dict:
    """Arguments of two tokens, turns or rollouts, by their names."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation != "Tensor":
            arguments |= {name: NUMBERS[name]} if name in NUMBERS else {}
        elif function is losses.joint_loss:
            arguments[name] = torch.tensor(0.1, dtype=dtype)
        elif function is divergences.generalised_jsd:
            arguments[name] = torch.zeros(2, 3, dtype=dtype)
        else:
            floats = torch.tensor([0.25, 0.5], dtype=dtype, requires_grad=True)
            arguments[name] = {IDS: torch.tensor([0, 1]), FLOAT: floats}.get(kind(name), torch.ones(2))
    return arguments | ({"generator": torch.Generator()} if function is allocation.permuted_weights else {})


def refused(function, name: str, value) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        function(**{**valid(function), name: value})


@pytest.mark.parametrize("function", [*LOSSES, *TOKEN_LOSSES, *CONSTANTS])
def test_wrong_tensors_are_named(function):
    for name, value in valid(function).items():
        if torch.is_tensor(value):
            for wrong in (value.detach().view(2, 1), torch.ones(3).to(value.dtype), *WRONG[kind(name)]):
                refused(function, name, wrong)


@pytest.mark.parametrize("function", OUT_OF_RANGE)
def test_numbers_out_of_range_are_named(function):
    for name, value in OUT_OF_RANGE[function].items():
        refused(function, name, value)
        if isinstance(value, float):
            refused(function, name, math.nan)


def test_conditions_of_single_functions():
    infinite = torch.full((2,), math.inf)
    refused(allocation.relative_weights, "scores", infinite)
    refused(allocation.relative_weights, "scores", -torch.ones(2))
    refused(allocation.turn_scores, "turn_ids", torch.tensor([0, 2]))
    refused(allocation.turn_scores, "num_turns", -1)
    refused(advantages.group_relative_advantages, "returns", infinite)
    refused(advantages.penalised_advantages, "trajectory_ids", torch.tensor([0, 2]))
    refused(divergences.generalised_jsd, "teacher_logits", torch.zeros(1, 3))
    for name in ("outcome_loss", "surrogate_loss", "dense_loss"):
        refused(losses.joint_loss, name, torch.zeros(1))
        refused(losses.joint_loss, name, torch.tensor(math.nan))
    refused(losses.surrogate_mean, "turn_ids", torch.tensor([0, 2]))
    for function in (allocation.hindsight_gap, lambda first, second: divergences.engine_divergences(first, second[:1])):
        with pytest.raises(ValueError, match="logprobs"):
            function(infinite, infinite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [*LOSSES, *CONSTANTS])
def test_dtype_is_kept_and_only_logprobs_of_a_loss_get_a_gradient(function, dtype):
    arguments = valid(function, dtype)
    result = function(**arguments)
    result = result[0] if isinstance(result, tuple) else result
    assert result.dtype == dtype
    assert result.requires_grad == (function in LOSSES)
    if result.requires_grad:
        result.backward()  # the result is a scalar
        assert [name for name, value in arguments.items() if getattr(value, "grad", None) is not None] == ["logprobs"]

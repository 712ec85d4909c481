"""All objectives name wrong arguments, keep dtypes, and give a gradient to at most one argument."""

import inspect
import math

import pytest
import torch

from trial_ray.objectives import advantages, allocation, divergences, losses, shaping

UNCHECKED = {losses.bounded_ratio, divergences.engine_divergences}


def functions_of(*modules):
    return [
        each
        for module in modules
        for name, each in vars(module).items()
        if not name.startswith("_") and getattr(each, "__module__", None) == module.__name__ and each not in UNCHECKED
    ]


LOSSES = [
    losses.clipped_losses, losses.dense_hindsight_loss, losses.weighted_likelihood_loss, divergences.k3_divergence
]  # fmt: skip
CONSTANTS = [
    *functions_of(advantages, allocation, shaping), losses.importance_weights, losses.effective_sample_size
]  # fmt: skip
FUNCTIONS = functions_of(advantages, allocation, shaping, losses, divergences)
VALID = {
    "cap": 2.0,
    "strength": 0.5,
    "discount": 0.9,
    "num_turns": 2,
    "coefficient": 0.1,
    "alpha": 1.0,
    "bound": 0.2,
    "mean": "rows",
    "length": 3,
    "generator": torch.Generator(),
}
OUT_OF_RANGE = {
    "cap": 0.5,
    "strength": -0.1,
    "discount": 1.5,
    "coefficient": -0.1,
    "alpha": -1.0,
    "bound": 0.0,
    "mean": "turns",
    "length": 0,
    "mode": "turns",
    "estimator": "mean",
    "clip": -0.1,
    "clip_low": -0.1,
    "clip_high": -0.1,
    "dual_clip": 1.0,
    "temperature": 0.0,
    "temperatures": (1.0, 0.0),
    "slope": -0.1,
    "epsilon": 0.0,
    "mix": 1.5,
}
WRONG = {
    "float": [torch.tensor([0.1, math.nan]), torch.ones(2).long(), torch.ones(2).half()],
    "loss": [torch.tensor(math.nan)],
    "logits": [torch.zeros(1, 3)],
    "ids": [torch.tensor([0, -1]), torch.zeros(2)],
    "mask": [torch.full((2,), 0.5), torch.full((2,), 2)],
    "counts": [torch.full((2,), 0.5), -torch.ones(2)],
}


def kind(name):
    ending = name.rpartition("_")[2]
    return ending if ending in WRONG else "float"


def valid(function, dtype=torch.float32):
    """Arguments of two tokens, turns or rollouts, by their names."""
    parameters = inspect.signature(function).parameters.items()
    tensors = {
        "float": torch.tensor([0.25, 0.5], dtype=dtype),
        "loss": torch.tensor(0.1, dtype=dtype),
        "logits": torch.zeros(2, 3, dtype=dtype),
        "ids": torch.tensor([0, 1]),
    }
    made = {
        name: tensors.get(kind(name), torch.ones(2)).clone().requires_grad_(kind(name) == "float")
        for name, each in parameters
        if each.annotation == "Tensor"
    }
    return made | {name: VALID[name] for name, _ in parameters if name in VALID}


def refused(function, name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        function(**{**valid(function), name: value})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments_are_named(function):
    for name, value in valid(function).items():
        if torch.is_tensor(value):
            for wrong in (value.detach()[..., None], torch.ones(3).to(value.dtype), *WRONG[kind(name)]):
                refused(function, name, wrong)
    for name in OUT_OF_RANGE.keys() & inspect.signature(function).parameters:
        refused(function, name, OUT_OF_RANGE[name])
        if isinstance(OUT_OF_RANGE[name], float):
            refused(function, name, math.nan)


def test_conditions_of_single_functions():
    infinite = torch.full((2,), math.inf)
    refused(allocation.relative_weights, "scores", infinite)
    refused(allocation.relative_weights, "scores", -torch.ones(2))
    refused(allocation.turn_scores, "turn_ids", torch.tensor([0, 2]))
    refused(allocation.turn_scores, "num_turns", -1)
    refused(allocation.hindsight_gap, "clip", 0.0)
    refused(losses.clipped_losses, "clip_low", 1.1)
    refused(advantages.rescaled_advantages, "clip", 1.5)
    refused(advantages.group_relative_advantages, "returns", infinite)
    refused(advantages.penalised_advantages, "trajectory_ids", torch.tensor([0, 2]))
    refused(losses.surrogate_mean, "turn_ids", torch.tensor([0, 2]))
    for function in (allocation.hindsight_gap, lambda first, second: divergences.engine_divergences(first, second[:1])):
        with pytest.raises(ValueError, match="logprobs"):
            function(infinite, infinite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [*LOSSES, *CONSTANTS])
def test_dtype_is_kept_and_only_the_first_argument_gets_a_gradient(function, dtype):
    arguments = valid(function, dtype)
    result = function(**arguments)
    result = result[0] if isinstance(result, tuple) else result
    assert result.dtype == (torch.float64 if function is losses.effective_sample_size else dtype)
    assert result.requires_grad == (function in LOSSES)
    if result.requires_grad:
        result.sum().backward()
        received = [name for name, value in arguments.items() if getattr(value, "grad", None) is not None]
        assert received == ["log_ratio" if function is losses.clipped_losses else "logprobs"]

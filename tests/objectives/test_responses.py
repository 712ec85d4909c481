"""Surrogates of whole responses, GSPO's ratio and Dr. GRPO's mean, against loops over ragged turns."""

import pytest
import torch

from trial_ray.objectives.choices import SURROGATE_MEANS
from trial_ray.objectives.responses import surrogate_mean

LENGTH = 7


def test_a_turn_without_an_eligible_token_counts_as_a_row_of_nothing():
    arguments = (torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]), 2)
    found = {mean: surrogate_mean(*arguments, mean, LENGTH).item() for mean in SURROGATE_MEANS}
    assert found == pytest.approx({"tokens": 1.5, "rows": 0.75, "fixed_length": 3 / (2 * LENGTH)})


@pytest.mark.parametrize(("name", "value"), [("mean", "turns"), ("length", 0), ("turn_ids", torch.tensor([0, 2]))])
def test_wrong_arguments_are_named(name, value):
    good = {"losses": torch.ones(2), "mask": torch.ones(2), "turn_ids": torch.tensor([0, 1]), "num_turns": 2}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        surrogate_mean(**good | {"mean": "rows", "length": 3} | {name: value})

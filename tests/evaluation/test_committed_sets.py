"""Committed evaluation sets against the data that they were chosen from."""

import pytest
from third_party import ALFWORLD as RELEASE

from trial_ray.adapters.registry import make_entries
from trial_ray.evaluation.evaluation_sets import EvaluationSet, choose_evaluation_set


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "env_id", "split"),
    [
        ("seen-128", "trial/ALFWorld-v0", "valid_seen"),
        ("unseen-128", "trial/ALFWorld-v0", "valid_unseen"),
        ("webshop-128", "trial/WebShop-v0", "test"),
    ],
)
def test_sets_are_in_the_published_data(name, env_id, split, published_shop, own_cache):
    data = str(published_shop if split == "test" else RELEASE)
    (entry,) = make_entries([(env_id, {"split": split, "data": data}, 1.0)])
    assert choose_evaluation_set(entry, name) == EvaluationSet.from_entry(entry, 128)

"""What the cluster must have before actors are created."""

from __future__ import annotations

import pytest
import ray
from ray.util import placement_group_table

from trial_ray.algorithms.placement import require_resources
from trial_ray.errors import InfrastructureError

pytestmark = [pytest.mark.actors, pytest.mark.usefixtures("ray_session")]


def test_what_fits_passes_and_is_not_kept():
    require_resources([{"CPU": 1.0, "GPU": 0}, {"CPU": 0.0}, {"CPU": 0.5}], timeout_s=30)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.parametrize("bundles", [[], [{"CPU": 0.0}], [{"CPU": 0, "GPU": 0.0}, {}]])
def test_actors_that_ask_for_nothing_fit_anywhere(bundles):
    require_resources(bundles, timeout_s=1)


def test_what_does_not_fit_is_told_with_what_there_is():
    there = ray.cluster_resources()["CPU"]
    with pytest.raises(
        InfrastructureError, match=rf"CPU: 1000\.5 asked for in bundles of up to 1000, {there:g} in the"
    ):
        require_resources([{"CPU": 1000.0}, {"CPU": 0.5}], timeout_s=1)

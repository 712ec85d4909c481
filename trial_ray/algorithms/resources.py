"""Whether the cluster has what a run's actors ask for, before any of them is created and would wait for ever."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from trial_ray.errors import InfrastructureError

Bundle = dict[str, float]


def reserve(bundles: Sequence[Bundle], strategy: str, timeout_s: float) -> PlacementGroup:
    """Reserve bundles of resources, all at once; an autoscaler may start nodes for them meanwhile.

    Args:
        bundles: at least one that asks for something.
        strategy: how they are placed, as Ray names it.
        timeout_s: how long to wait for them.

    Raises:
        InfrastructureError: the cluster did not offer them within ``timeout_s`` seconds; says what was asked for and what
            there is.
    """
    wanted = _asking(bundles)
    group: PlacementGroup = placement_group(wanted, strategy=strategy)
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    total, free = ray.cluster_resources(), ray.available_resources()
    names = sorted({name for bundle in wanted for name in bundle})
    lines = [
        f"{name}: {sum(bundle.get(name, 0) for bundle in wanted):g} asked for in bundles of up to "
        f"{max(bundle.get(name, 0) for bundle in wanted):g}, {total.get(name, 0):g} in the cluster, "
        f"{free.get(name, 0):g} free"
        for name in names
    ]
    raise InfrastructureError(
        f"The cluster did not offer what the run's actors ask for within resource_timeout_s={timeout_s:g} s ({'; '.join(lines)}). "
        "Ask for less (num_env_runners, num_engines, num_learners and what each takes), start nodes, or raise "
        "resource_timeout_s where an autoscaler needs longer."
    )


def require_resources(bundles: Sequence[Bundle], timeout_s: float) -> None:
    """Check that the cluster can hold the bundles, all at once and wherever they fit; errors as :func:`reserve`.

    Actors that ask for nothing, as Ray allows, fit anywhere.
    """
    if _asking(bundles):
        # No other strategy: outside placement groups Ray places actors one by one.
        remove_placement_group(reserve(bundles, "PACK", timeout_s))


def _asking(bundles: Sequence[Bundle]) -> list[Bundle]:
    """The bundles that ask for something, without amounts of 0, which Ray refuses in a placement group."""
    wanted = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
    return [bundle for bundle in wanted if bundle]

"""Capacity of a cluster: how many trials of a sweep fit at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trial_ray.config.sampling import actor_range
from trial_ray.errors import ConfigError
from trial_ray.planning.fit import Machine, make_plan
from trial_ray.planning.memory import GIB, PlanRequest

if TYPE_CHECKING:
    from trial_ray.algorithms.grpo import GRPOConfig

MEMORY = ("memory", "object_store_memory")
"""Ray resources that are measured in bytes; their sum is the memory that was free when the nodes started."""
TOLERANCE = 1e-6
"""Rounding tolerance for resource amounts, which are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of a trial and of the cluster, and the number of trials that fit.

    Attributes:
        needs: amount of each Ray resource that the largest trial reserves.
        offered: amounts that the cluster has.
        bytes_needed: predicted host memory of the largest trial; ``None`` if its model's shape is unknown.
        bytes_offered: memory of the cluster's nodes.
    """

    needs: dict[str, float]
    offered: dict[str, float]
    bytes_needed: float | None
    bytes_offered: float

    @classmethod
    def of(cls, configs: Iterable[GRPOConfig], cluster: Mapping[str, float]) -> Capacity:
        """Compare the resources that configs need with the resources of a cluster.

        Args:
            configs: configs that together contain every value of the search (:attr:`SweepPlan.configs`).
            cluster: resources as returned by ``ray.cluster_resources()``.
        """
        needs: dict[str, float] = {}
        bytes_needed: float | None = 0.0
        for config in configs:
            reserved = _reserved(config)
            needs = {name: max(needs.get(name, 0.0), reserved.get(name, 0.0)) for name in {**needs, **reserved}}
            predicted = _host_bytes(config)
            bytes_needed = None if predicted is None or bytes_needed is None else max(bytes_needed, predicted)
        offered = {name: cluster.get(name, 0.0) for name in needs}
        return cls(needs, offered, bytes_needed, sum(cluster.get(name, 0.0) for name in MEMORY))

    @property
    def by_resources(self) -> int:
        """Number of trials that fit the cluster's resources at a time."""
        return min(int(self.offered[name] / need + TOLERANCE) for name, need in self.needs.items())

    @property
    def by_memory(self) -> int | None:
        """Number of trials that fit the cluster's memory; ``None`` if their memory cannot be predicted."""
        return int(self.bytes_offered / self.bytes_needed) if self.bytes_needed else None

    @property
    def trials(self) -> int:
        """Number of trials to run at a time, at least 1."""
        return max(1, min(self.by_resources, self.by_resources if self.by_memory is None else self.by_memory))

    def require_one(self, local: bool) -> None:
        """Reject a sweep if not even one trial can start.

        Args:
            local: True if the cluster is only this machine; other clusters may grow and are not checked.

        Raises:
            ConfigError: a trial reserves more than the cluster has; the message contains both amounts.
        """
        if local and self.by_resources < 1:
            raise ConfigError(
                f"A trial reserves {self._amounts()}, so no trial could start. Lower num_cpus_per_env_runner, num_cpus_per_engine, "
                "num_cpus_per_learner or num_cpus_for_main_process (fractions are allowed), or the number of actors."
            )

    def describe(self, number: int, at_once: int) -> str:
        """Return one line that describes how ``number`` trials will run."""
        memory = (
            "its memory cannot be predicted"
            if self.bytes_needed is None
            else f"about {self.bytes_needed / GIB:.1f} of {self.bytes_offered / GIB:.1f} GiB"
        )
        trials = "trial" if number == 1 else "trials"
        tight = ", which may not suffice for one trial" if self.by_memory == 0 else ""
        return f"{number} {trials}, {min(number, at_once)} at a time: each takes {self._amounts()}, {memory}{tight}"

    def _amounts(self) -> str:
        names = sorted(self.needs)
        return ", ".join(
            f"{self.needs[name]:g} of {self.offered[name]:g} {name}{'s' if name in ('CPU', 'GPU') else ''}"
            for name in names
        )


def _reserved(config: GRPOConfig) -> dict[str, float]:
    bundles: list[dict[str, Any]] = config.algo_class.default_resource_request(config).bundles
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return {name: amount for name, amount in total.items() if amount > 0}


def _host_bytes(config: GRPOConfig) -> float | None:
    try:
        request = PlanRequest.of(config)
        engines, runners = actor_range(config.num_engines)[0], actor_range(config.num_env_runners)[0]
        reserved = replace(request, num_engines=engines, num_env_runners=max(1, runners))
        actors = make_plan(reserved, Machine(None, None)).actors
    except ConfigError:
        return None  # The model's shape is unknown here.
    return sum(actor.count * actor.total for actor in actors if not actor.on_gpu)

"""How many trials of a sweep run at a time: what each reserves and is predicted to hold, against what Ray offers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trial_ray.errors import ConfigError
from trial_ray.planning.memory import Machine, make_plan
from trial_ray.planning.request import GIB, PlanRequest

if TYPE_CHECKING:
    from trial_ray.algorithms.config import GRPOConfig

MEMORY = ("memory", "object_store_memory")
"""Ray's resources that are bytes: together what its nodes had free when they started."""
LEAST_OF_A_RESOURCE = 1e-6
"""Amounts of a resource are sums of fractions."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of a trial and of the cluster, and how many trials fit.

    Attributes:
        needs: amount of each of Ray's resources that the largest trial reserves.
        offered: amounts that the cluster has.
        bytes_needed: host memory that the largest trial is predicted to hold; ``None`` where its model's shape is unknown.
        bytes_offered: memory of the cluster's nodes.
    """

    needs: dict[str, float]
    offered: dict[str, float]
    bytes_needed: float | None
    bytes_offered: float

    @classmethod
    def of(cls, configs: Iterable[GRPOConfig], cluster: Mapping[str, float]) -> Capacity:
        """Hold configs against a cluster.

        Args:
            configs: that meet every value of the search once.
            cluster: as ``ray.cluster_resources()`` gives it.
        """
        needs: dict[str, float] = {}
        bytes_needed: float | None = 0.0
        for config in configs:
            reserved = _reserved(config)
            needs = {name: max(needs.get(name, 0.0), reserved.get(name, 0.0)) for name in {**needs, **reserved}}
            found = _host_bytes(config)
            bytes_needed = None if found is None or bytes_needed is None else max(bytes_needed, found)
        offered = {name: cluster.get(name, 0.0) for name in needs}
        return cls(needs, offered, bytes_needed, sum(cluster.get(name, 0.0) for name in MEMORY))

    @property
    def by_resources(self) -> int:
        """Trials whose reservations the cluster can grant at a time."""
        return min(int(self.offered[name] / need + LEAST_OF_A_RESOURCE) for name, need in self.needs.items())

    @property
    def by_memory(self) -> int | None:
        """Trials whose predicted memory there is; ``None`` where it cannot be predicted."""
        return int(self.bytes_offered / self.bytes_needed) if self.bytes_needed else None

    @property
    def trials(self) -> int:
        """Trials at a time, at least one."""
        return max(1, min(self.by_resources, self.by_resources if self.by_memory is None else self.by_memory))

    def require_one(self, local: bool) -> None:
        """Refuse a sweep of which no trial could ever start.

        Args:
            local: whether the cluster is this machine, which does not grow.

        Raises:
            ConfigError: says what a trial reserves and what there is.
        """
        if local and self.by_resources < 1:
            raise ConfigError(
                f"A trial reserves {self._amounts()}, so that none could start. Lower num_cpus_per_env_runner, "
                "num_cpus_per_engine, num_cpus_per_learner or num_cpus_for_main_process (fractions will do), or the number of "
                "actors."
            )

    def describe(self, number: int, at_once: int) -> str:
        """In one line, how a number of trials will run."""
        memory = (
            "its memory cannot be predicted"
            if self.bytes_needed is None
            else f"about {self.bytes_needed / GIB:.1f} of {self.bytes_offered / GIB:.1f} GiB"
        )
        several = "trial" if number == 1 else "trials"
        tight = ", which may not suffice for one" if self.by_memory == 0 else ""
        return f"{number} {several}, {min(number, at_once)} at a time: each takes {self._amounts()}, {memory}{tight}"

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
        actors = make_plan(PlanRequest.of(config), Machine(None, None)).actors
    except ConfigError:
        return None  # nothing here tells the model's shape
    return sum(actor.count * actor.total for actor in actors if not actor.on_gpu)

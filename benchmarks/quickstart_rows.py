"""The rows that the update is measured on: one iteration of the quickstart, sampled once and kept in the user's cache.

The policy is the quickstart's after its warm start (about three minutes, cached as in ``make train``), the groups are those of
its first iteration: 16 games with 8 rollouts each, about 1,200 rows of 80 tokens.
"""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import trial_ray.rollout.trajectory
from trial_ray.algorithms.initial_policy import initial_policy
from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup
from trial_ray.warmstart.cache import content_key, files_digest, get_or_build

EXAMPLE = Path(__file__).parent.parent / "tuned_examples" / "alfworld_quickstart.py"


@dataclass(frozen=True)
class Quickstart:
    """What the quickstart's first update is given.

    Attributes:
        model_path: the warm-started policy.
        groups: the groups of its first iteration, in task order.
    """

    model_path: str
    groups: list[TrajectoryGroup]

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, in task order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def quickstart_config() -> Any:
    """The example's config, its values those of the file; a new one at each call."""
    return runpy.run_path(str(EXAMPLE))["config"]


def quickstart_groups(sample: Callable[[Any], list[TrajectoryGroup]] | None = None) -> Quickstart:
    """The quickstart's first groups, from the cache where they are there.

    Args:
        sample: from a config to groups; by default the config's own algorithm with its engine.
    """
    config = quickstart_config()
    model_path = initial_policy(config)
    config.policy(model_path=model_path, warm_start=None)
    code = [EXAMPLE, Path(str(trial_ray.rollout.trajectory.__file__))]
    model = [path for path in Path(model_path).iterdir() if path.suffix in (".json", ".safetensors")]
    key = content_key({"code": files_digest(code), "model": files_digest(model)})

    def build(folder: Path) -> None:
        (folder / "groups.pickle").write_bytes(pickle.dumps((sample or _sample)(config)))

    folder, _ = get_or_build("bench", key, build)
    # Written by this function into the user's own cache.
    return Quickstart(model_path, pickle.loads((folder / "groups.pickle").read_bytes()))


def _sample(config: Any) -> list[TrajectoryGroup]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    algorithm = config.build_algo()
    try:
        batch = algorithm.sampler.sample(1)
        return [ray.get(sample.ref)[0] for sample in batch.kept]
    finally:
        algorithm.stop()
        ray.shutdown()


if __name__ == "__main__":
    found = quickstart_groups()
    rows = [turn for trajectory in found.trajectories for turn in trajectory.turns]
    tokens = sum(len(turn.prompt_ids) + len(turn.response_ids) - 1 for turn in rows)
    print(
        f"{len(found.groups)} groups, {len(found.trajectories)} trajectories, {len(rows)} rows, {tokens} input tokens"
    )

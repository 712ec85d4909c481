"""Brings what env runners and learners recorded on other nodes to the driver's, where nodes share no file system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trial_ray.files import partial_of
from trial_ray.runs.checkpoints import RUN_FILE

ANSWER_S = 30.0
"""How long nodes may take to hand over their files."""
READ_S = 1.0
"""How long what a node has handed over by then may take to be read."""
RECORDED = ("trajectories", "training")
"""Folders of a run into which processes on other nodes write."""


class NodeRecords:
    """The recordings of a run on other nodes.

    Args:
        folder: of the run here.
        there: of the run on the other nodes.
    """

    def __init__(self, folder: Path, there: Path) -> None:
        self._folder, self._there = folder, there
        self._taken: dict[str, list[str]] = {}
        self._sharing: set[str] = set()

    def drop(self) -> None:
        """Remove what earlier commands left on other nodes, which they have not brought here before their last checkpoint."""
        self._ask(drop=True)

    def gather(self) -> None:
        """Bring new files here, then have their nodes remove them; a node that does not answer is asked again the next time."""
        self._ask(drop=False)

    def _ask(self, *, drop: bool) -> None:
        if not ray.is_initialized():
            return
        asked = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - self._sharing
        others, calls = asked - {ray.get_runtime_context().get_node_id()}, {}
        if not others:
            return
        for node in others:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(hand_over).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
            calls[node] = task.remote(self._there, self._taken.pop(node, []), drop)
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=ANSWER_S)
        for node, call in calls.items():
            try:
                found = ray.get(call, timeout=READ_S)
            except RayError:
                ray.cancel(call, force=True)
                continue
            if found is None:
                self._sharing.add(node)
                continue
            for name, content in found.items():
                target = self._folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = partial_of(target)
                partial.write_bytes(content)
                os.replace(partial, target)
            self._taken[node] = list(found)


def hand_over(folder: Path, taken: Sequence[str], drop: bool) -> dict[str, bytes] | None:
    """The files recorded below ``folder`` on this node, after those in ``taken`` are removed; ``None`` where nodes share it.

    Args:
        folder: of the run.
        taken: names of the files that have arrived.
        drop: whether to remove all.
    """
    if (folder / RUN_FILE).exists():
        return None
    # No other folder: the path may lead to somebody else's files on this node.
    recorded = [path for each in RECORDED for path in (folder / each).glob("iteration=*")]
    if drop:
        for path in recorded:
            shutil.rmtree(path, ignore_errors=True)
    for name in taken:
        (folder / name).unlink(missing_ok=True)
    files = (path for each in recorded for path in each.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if not path.name.startswith(".")}

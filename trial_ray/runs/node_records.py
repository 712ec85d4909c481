"""Moves files that env runners and learners record on other nodes to the driver's node, if nodes share no file system."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trial_ray.files import replacing
from trial_ray.runs.checkpoints import RUN_FILE

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""Time limit for other nodes to send their files, in seconds."""
DROP_S = 300.0
"""Time limit for other nodes to delete files of earlier commands, in seconds."""
RECORDED = ("trajectories", "training")
"""Folders of a run into which processes on other nodes write."""


class NodeRecords:
    """Files that processes of a run have recorded on other nodes.

    Args:
        folder: folder of the run on this node.
        remote_folder: folder of the run on the other nodes.
    """

    def __init__(self, folder: Path, remote_folder: Path) -> None:
        self._folder, self._remote_folder = folder, remote_folder
        self._calls: dict[str, Any] = {}
        """Pending remote calls of :func:`send_files`, by the id of the node on which they run."""
        self._sharing: set[str] = set()
        """Ids of the nodes that share the run's folder with this node."""

    def drop(self) -> None:
        """Delete the files of earlier commands on other nodes that :meth:`gather` has not moved to this node."""
        self._call_nodes(drop=True, timeout_s=DROP_S)
        while self._calls:  # Cancel pending calls, which would later delete this command's files.
            node, call = self._calls.popitem()
            ray.cancel(call)
            logger.warning("Node %s did not answer within %.0f s; it keeps files of earlier commands", node, DROP_S)

    def gather(self) -> None:
        """Move new files to this node; files of a node that does not answer in time are moved by a later call."""
        self._call_nodes(drop=False, timeout_s=ANSWER_S)

    def _call_nodes(self, *, drop: bool, timeout_s: float) -> None:
        if not ray.is_initialized():
            return
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {ray.get_runtime_context().get_node_id()}
        for node in nodes - self._sharing - self._calls.keys():
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(send_files).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
            self._calls[node] = task.remote(self._remote_folder, drop)
        calls = list(self._calls.values())
        ready = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0] if calls else []
        for node in [node for node, call in self._calls.items() if call in ready]:
            try:
                files = ray.get(self._calls.pop(node), timeout=ANSWER_S)
            except RayError:
                continue  # The node has failed, so its files are lost.
            if files is None:
                self._sharing.add(node)
                continue
            for name, content in files.items():
                with replacing(self._folder / name) as partial:
                    partial.write_bytes(content)


def send_files(folder: Path, drop: bool) -> dict[str, bytes] | None:
    """Return and delete the files recorded below ``folder`` on this node; ``None`` if the driver's node shares the folder.

    Args:
        folder: folder of the run.
        drop: whether to delete the files without returning them.
    """
    if (folder / RUN_FILE).exists():
        return None
    # Read only the folders in RECORDED: on this node, the path may also contain files of another user.
    recorded = [path for name in RECORDED for path in (folder / name).glob("iteration=*")]
    if drop:
        for path in recorded:
            shutil.rmtree(path, ignore_errors=True)
        return {}
    files = [path for root in recorded for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")]
    content = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    return content

"""Nodes are taken away and given back while a run trains: it goes on with what there is, and ends as if nothing had happened.

Four Ray nodes have room for one engine and one env runner each. A run begins with one of each and takes the others in; one node is
drained, one killed during sampling, three join. Engines decode one request at a time and requests have seeds, so a run of fixed
size ends with the same weights.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fault_table import lost_rows
from ray_nodes import as_options, cluster_of
from safetensors.torch import load_file

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
WAIT_S, DRAIN_S, MOST = 300.0, 120, 5
SETTINGS = {
    "engine": "transformers",
    "engine_kwargs": {"max_batch": 1, "num_threads": 1},
    "evaluation_split": None,
    "env_config.max_turns": 4,
    "tasks_per_iteration": 10,
    # Games so short are never won: without it nothing would be learned, and all weights would be equal.
    "entropy_coeff": 0.01,
    "group_size": 2,
    "hindsight_start_iteration": 1,
    "seeded_sampling": True,
    "custom_resources_per_engine": {"engine": 1},
    "custom_resources_per_env_runner": {"env_runner": 1},
}


class Run:
    """A ``trial-ray train`` on a cluster, whose iterations are read as they are written."""

    def __init__(self, nodes, folder, settings, iterations):
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = ["trial-ray", "train", "tuned_examples/alfworld_quickstart.py", "--out", str(folder)]
        command += ["--iterations", str(iterations), "--checkpoint-every", str(iterations)]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command + as_options({**SETTINGS, **settings}),
                cwd=ROOT,
                env={**nodes.environment, "RAY_ADDRESS": nodes.address},
                stdout=output,
                stderr=output,
            )

    def iterations(self):
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_for(self, seen):
        deadline = time.monotonic() + WAIT_S
        while not seen(self.iterations()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for_actors(self, number):
        self.wait_for(lambda found: bool(found) and actors(found[-1]) == (number, number))

    def wait_for_next(self, count):
        target = len(self.iterations()) + count
        self.wait_for(lambda found: len(found) >= target)

    def end(self):
        assert self.process.wait(timeout=WAIT_S) in (0, 130), self.log.read_text()

    def weights(self):
        newest = max((self.folder / "checkpoints").iterdir(), key=lambda folder: folder.name)
        (model,) = newest.rglob("model.safetensors")
        return model


def actors(metrics):
    return metrics["actors/num_engines"], metrics["actors/num_env_runners"]


def test_two_of_four_nodes_leave_and_three_come(model_path, tmp_path, tell):
    seats = {"engine": 1, "env_runner": 1}
    with cluster_of("one", "two", "three", resources=seats) as nodes:
        number = {"num_engines": (1, MOST), "num_env_runners": (1, MOST)}
        run = Run(nodes, tmp_path / "elastic", {"model_path": model_path, **number}, 100_000)
        fixed = None
        try:
            run.wait_for_actors(4)
            run.wait_for_next(2)
            nodes.drain("one", DRAIN_S)
            run.wait_for_actors(3)
            nodes.wait_for_end("one", DRAIN_S)
            run.wait_for_next(2)
            time.sleep(0.1)  # into the sampling of the next
            nodes.kill("two")
            run.wait_for_actors(2)
            for name in ("four", "five", "six"):
                nodes.start_worker(name)
            run.wait_for_actors(MOST)
            run.wait_for_next(2)
            run.process.send_signal(signal.SIGINT)
            run.end()
            found = run.iterations()
            number = {"num_engines": MOST, "num_env_runners": MOST}
            fixed = Run(nodes, tmp_path / "fixed", {"model_path": model_path, **number}, len(found))
            fixed.end()
        finally:
            for each in filter(None, (run, fixed)):
                each.process.kill()
                each.process.wait(timeout=60)
    assert run.weights().read_bytes() == fixed.weights().read_bytes()
    first, last = load_file(Path(model_path) / "model.safetensors"), load_file(run.weights())
    changed = [name for name in first.keys() & last.keys() if not first[name].float().equal(last[name].float())]
    assert changed, "what never changes is always equal"
    assert [each["rows/sampled"] for each in found] == [each["rows/sampled"] for each in fixed.iterations()]
    assert all(each["groups/num_trained"] == 10 for each in found)
    assert actors(found[0]) == (1, 1)
    lost = sum(map(lost_rows, found))
    assert lost == 0
    tell("a node of an engine and an env runner is drained, another killed", "training", "with the rest", None, lost)

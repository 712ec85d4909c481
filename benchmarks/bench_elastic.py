"""A run on nodes that come and go: what each change costs, and that nothing is lost.

    python benchmarks/bench_elastic.py

Four Ray nodes on this machine, each with room for one engine and one env runner. A run begins with one of each and takes the
others in; then one node is drained, one is killed during sampling, and three new ones join. It is stopped, and a run of fixed size
makes as many iterations: engines decode one request at a time and requests have seeds, so both must end with the same weights.

Leaves out: GPUs, machines that differ, networks, an autoscaler (nodes are started by this script).
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fault_table import lost_rows
from measure import Measure, write_report
from ray_nodes import RayNodes, as_options, cluster_of

from trial_ray.models.packaged import alfworld_tiny

ROOT = Path(__file__).parents[1]
WAIT_S = 300.0
DRAIN_S = 120
SEATS = {"engine": 1, "env_runner": 1}
MOST = 5
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


@dataclass
class Elastic:
    """What happened.

    Attributes:
        events: seconds since the first iteration, and what was done or seen.
        iterations: of the run that grew and shrank, each with the seconds at which it ended and its metrics.
        fixed: metrics of the run of fixed size.
        same_weights: whether both ended with the same bytes.
        changed_weights: whether these are not those that training began with.
        faults: lines in which the run told of losses.
    """

    events: list[tuple[float, str]] = field(default_factory=list)
    iterations: list[dict[str, float]] = field(default_factory=list)
    fixed: list[dict[str, float]] = field(default_factory=list)
    same_weights: bool = False
    changed_weights: bool = False
    faults: list[str] = field(default_factory=list)

    def lost(self) -> int:
        """Rows that no iteration accounts for."""
        return sum(map(lost_rows, self.iterations))

    def delay(self, event: str) -> float:
        """By how much the iteration in which something was done took longer than the median of the five before it."""
        (at,) = [seconds for seconds, name in self.events if name == event]
        index = next(index for index, each in enumerate(self.iterations) if each["ended"] > at)
        seconds = [each["time_this_iter_s"] for each in self.iterations[: index + 1]]
        return seconds[-1] - statistics.median(seconds[-6:-1])


class Run:
    """A ``trial-ray train`` on a cluster, whose iterations are read as they are written.

    Args:
        nodes: the cluster.
        folder: of the run.
        settings: of its config.
        iterations: to make.
    """

    def __init__(self, nodes: RayNodes, folder: Path, settings: dict[str, Any], iterations: int) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self._began: float | None = None
        self._ended: list[float] = []
        words = [
            "trial-ray", "train", "tuned_examples/alfworld_quickstart.py", "--out", str(folder), "--iterations", str(iterations),
            "--checkpoint-every", str(iterations), *as_options({**SETTINGS, **settings}),
        ]  # fmt: skip
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**nodes.environment, "RAY_ADDRESS": nodes.address},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def seconds(self) -> float:
        """Since the first iteration ended."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    def iterations(self) -> list[dict[str, float]]:
        """Metrics of those made so far, and when each was seen to have ended."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        if found and self._began is None:
            self._began = time.monotonic()
        self._ended += [self.seconds()] * (len(found) - len(self._ended))
        return [{**each, "ended": ended} for each, ended in zip(found, self._ended, strict=True)]

    def wait_for(self, seen: Callable[[list[dict[str, float]]], bool]) -> list[dict[str, float]]:
        """Wait until the iterations made so far are as said."""
        deadline = time.monotonic() + WAIT_S
        while not seen(found := self.iterations()):
            assert self._process.poll() is None, f"the run ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"what was waited for never came: {self.log.read_text()}"
            time.sleep(0.02)
        return found

    def wait_for_actors(self, number: int) -> None:
        """Wait for an iteration that began with so many engines and env runners."""
        self.wait_for(lambda found: bool(found) and _actors(found[-1]) == (number, number))

    def wait_for_next(self, count: int = 1) -> None:
        """Wait until so many further iterations have ended."""
        target = len(self.iterations()) + count
        self.wait_for(lambda found: len(found) >= target)

    def stop(self) -> None:
        """Have it finish the iteration under way, and save."""
        self._process.send_signal(signal.SIGINT)
        self.end()

    def end(self) -> None:
        """Wait until it has ended by itself."""
        code = self._process.wait(timeout=WAIT_S)
        assert code in (0, 130), self.log.read_text()

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait(timeout=60)

    def weights(self) -> Path:
        """The model of its newest checkpoint."""
        newest = max((self.folder / "checkpoints").iterdir(), key=lambda folder: folder.name)
        (model,) = newest.rglob("model.safetensors")
        return model


def _actors(metrics: dict[str, float]) -> tuple[int, int]:
    return int(metrics["actors/num_engines"]), int(metrics["actors/num_env_runners"])


def play(folder: Path, model: Path) -> Elastic:
    """The whole story, in an empty folder.

    Args:
        folder: of both runs.
        model: folder of the first policy.
    """
    told = Elastic()
    settings = {"model_path": model}
    with cluster_of("one", "two", "three", resources=SEATS) as nodes:
        number = {"num_engines": (1, MOST), "num_env_runners": (1, MOST)}
        run = Run(nodes, folder / "elastic", {**settings, **number}, iterations=100_000)
        try:
            _change_nodes(nodes, run, told)
            run.stop()
        finally:
            run.kill()
        told.iterations = run.iterations()
        told.faults = [line for line in run.log.read_text().splitlines() if "replaced: " in line]
        fixed = {"num_engines": MOST, "num_env_runners": MOST}
        again = Run(nodes, folder / "fixed", {**settings, **fixed}, iterations=len(told.iterations))
        try:
            again.end()
        finally:
            again.kill()
        told.fixed = again.iterations()
    told.same_weights = run.weights().read_bytes() == again.weights().read_bytes()
    first, last = load_file(model / "model.safetensors"), load_file(run.weights())
    told.changed_weights = any(
        not torch.equal(first[name].float(), last[name].float()) for name in first.keys() & last.keys()
    )
    return told


def _change_nodes(nodes: RayNodes, run: Run, told: Elastic) -> None:
    def event(name: str) -> None:
        told.events.append((run.seconds(), name))

    run.wait_for_actors(4)
    event("four engines and env runners")
    run.wait_for_next(4)
    event("drain")
    nodes.drain("one", DRAIN_S)
    event("Ray knows of the drain")
    run.wait_for_actors(3)
    event("three engines and env runners")
    nodes.wait_for_end("one", DRAIN_S)
    event("the drained node has ended")
    run.wait_for_next(4)
    time.sleep(0.1)  # into the sampling of the next
    event("kill")
    nodes.kill("two")
    run.wait_for_actors(2)
    event("two engines and env runners")
    event("three nodes are started")
    for name in ("four", "five", "six"):
        nodes.start_worker(name)
    nodes.wait_for_nodes()
    event("three nodes have joined")
    run.wait_for_actors(MOST)
    event("five engines and env runners")
    run.wait_for_next(3)
    event("stop")


def report(told: Elastic) -> tuple[list[Measure], dict[str, Any]]:
    """The measures, and the story."""
    at = {name: seconds for seconds, name in told.events}
    sampled = sum(int(each["rows/sampled"]) for each in told.iterations)
    trained = sum(int(each["learners/default_policy/num_module_steps_trained"]) for each in told.iterations)
    same = [[each["rows/sampled"] for each in run] for run in (told.iterations, told.fixed)]
    joined = at["five engines and env runners"] - at["three nodes have joined"]
    measures = [
        Measure(
            "nodes that come and go: rows sampled and not trained",
            sampled - trained + told.lost(),
            "",
            0,
            "lower",
            f"{sampled} rows in {len(told.iterations)} iterations with 1 to {MOST} engines and env runners",
        ),
        Measure(
            "the same: weights other than those of a run of fixed size",
            float(not (told.same_weights and told.changed_weights)) + float(same[0] != same[1]),
            "",
            0,
            "lower",
            f"bytes of the model after the same {len(told.fixed)} iterations, and rows of each",
        ),
        Measure(
            "the same: delay by a drained node", told.delay("drain"), "s", note="against the median of 5 iterations"
        ),
        Measure("the same: delay by a killed node", told.delay("kill"), "s", note="its groups are played again"),
        Measure("the same: from three joined nodes to their use", joined, "s", note="starts of six actors"),
    ]
    names = ("iteration", "ended", "time_this_iter_s", "actors/num_engines", "actors/num_env_runners", "rows/sampled")
    timeline = [{name: round(each[name], 2) for name in names} for each in told.iterations]
    runs = [list(group) for _, group in itertools.groupby(timeline, key=lambda each: list(each.values())[3:5])]
    sizes = [
        {
            "engines": part[0]["actors/num_engines"],
            "env_runners": part[0]["actors/num_env_runners"],
            "iterations": len(part),
            "median_seconds": statistics.median(each["time_this_iter_s"] for each in part),
        }
        for part in runs
    ]
    events = [{"seconds": round(seconds, 2), "event": name} for seconds, name in told.events]
    return measures, {"events": events, "sizes": sizes, "iterations": timeline, "faults": told.faults}


def main() -> None:
    """Run, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_report(args.json, *report(play(Path(folder), alfworld_tiny())))


if __name__ == "__main__":
    main()

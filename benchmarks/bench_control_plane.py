"""Cost of the control plane: driver, messages, object store, plan, rows and sync, around engines and passes that cost nothing.

    python benchmarks/bench_control_plane.py --json benchmarks/results/control_plane.json --plot docs/assets/control_plane.png

The algorithm, env runners and learners are those of a run, as actors; engines answer random tokens (``null_engine.py``), the
environment's texts are fixed and learners make no passes (``null_run.py``). One quantity grows at a time, each in a process and a
Ray of its own. CPU seconds are those of processes, whatever else the machine does; env runners' CPU seconds contain the null
environment's. A learner's bytes are all that reach it for an update: rows, headers of all groups, references, and the turns that
other learners send; its share is the batch's rows over the number of learners. Nodes are local ones, each with an object store of
its own; the learner's node holds no engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
from bench_growth import exponent, save_model
from local_ray import local_ray
from measure import Measure, write_report
from null_engine import NullEngine
from null_run import NullAlgorithm, Received, Usage, iterate, null_config, received, with_tasks
from ray import ObjectRef
from ray.cluster_utils import Cluster

from trial_ray.engines.pool import MAX_CONCURRENCY, EnginePool
from trial_ray.engines.weights import pack_weights

SIZES = {
    "groups": (16, 64, 256, 1024),
    "groups_overlapped": (16, 64, 256),
    "runners": (4, 16, 48),  # 64 take 25 GB
    "engines": (1, 4, 16),
    "learners": (1, 2, 4, 8),
    "in_flight": (128,),
    "nodes": (1, 2, 4, 8),
}
TASKS = 64
"""Groups of an iteration where something else grows."""
BASE = {"env_runners": 4, "engines": 2, "learners": 1, "tasks": TASKS}
NODE_ENGINES = 8
WEIGHTS_MB = 48
REPEATS = 3
Point = dict[str, Any]


def repeated(algorithm: NullAlgorithm, usage: Usage, repeats: int) -> Point:
    """Medians over iterations."""
    points = [iterate(algorithm, usage) for _ in range(repeats)]
    middle: Point = {
        name: median(point[name] for point in points)
        for name, value in points[0].items()
        if not isinstance(value, dict)
    }
    phases = points[0]["phases_cpu_s"]
    middle["phases_cpu_s"] = {name: median(point["phases_cpu_s"][name] for point in points) for name in phases}
    return middle


def grow_groups(sizes: tuple[int, ...], model_path: str, max_staleness: int = 0) -> list[Point]:
    with run(null_config(model_path, **BASE)) as algorithm:
        usage = Usage(algorithm)
        with_tasks(algorithm, 16)
        iterate(algorithm, usage)
        points = []
        for size in sizes:
            with_tasks(algorithm, size, max_staleness)
            points.append({"size": size, **repeated(algorithm, usage, REPEATS if size < 1000 else 1)})
        return points


def grow_actors(quantity: str, sizes: tuple[int, ...], model_path: str) -> list[Point]:
    """Env runners or engines, each number in a run of its own, with the same work."""
    points = []
    for size in sizes:
        setting = {"runners": "env_runners", "engines": "engines"}[quantity]
        began = time.perf_counter()
        with run(null_config(model_path, **{**BASE, setting: size})) as algorithm:
            usage = Usage(algorithm)
            iterate(algorithm, usage)
            start_s = time.perf_counter() - began
            point = repeated(algorithm, usage, REPEATS)
            points.append({"size": size, "start_s": start_s, "memory_mb": usage.memory_mb(), **point})
    return points


def grow_learners(sizes: tuple[int, ...], model_path: str) -> list[Point]:
    """The same engines and env runners for all."""
    points = []
    with run(null_config(model_path, **{**BASE, "learners": sizes[0]})) as algorithm:
        for size in sizes:
            if size != sizes[0]:
                algorithm.reset(null_config(model_path, **{**BASE, "learners": size}).to_dict())
            usage = Usage(algorithm)
            iterate(algorithm, usage)
            point = repeated(algorithm, usage, REPEATS)
            points.append({"size": size, **point, **bytes_received(received(algorithm))})
    return points


def bytes_received(found: list[Received]) -> dict[str, float]:
    """What learners received, in MB: the most and its parts, the mean, and a learner's share of the batch's rows."""
    most = max(found, key=lambda each: each.total)
    batch = {ref: size for each in found for ref, size in each.rows.items()}
    return {
        "received_mb": most.total / 1e6,
        "rows_mb": sum(most.rows.values()) / 1e6,
        "headers_mb": most.headers / 1e6,
        "references_mb": most.references / 1e6,
        "exchanged_mb": most.exchanged / 1e6,
        "mean_received_mb": sum(each.total for each in found) / len(found) / 1e6,
        "share_mb": sum(batch.values()) / len(found) / 1e6,
    }


def in_flight(sizes: tuple[int, ...], model_path: str) -> list[Point]:
    """One env runner and one engine with so many episodes in flight."""
    points = []
    for size in sizes:
        config = null_config(model_path, tasks=TASKS).env_runners(max_episodes_in_flight=size)
        with run(config) as algorithm:
            usage = Usage(algorithm)
            iterate(algorithm, usage)
            points.append({"size": size, **repeated(algorithm, usage, REPEATS)})
    return points


@contextmanager
def run(config: Any) -> Iterator[NullAlgorithm]:
    algorithm = NullAlgorithm(config=config)
    try:
        yield algorithm
    finally:
        algorithm.stop()


def grow_nodes(sizes: tuple[int, ...], model_path: str) -> list[Point]:
    """Weights from the head to engines on so many nodes, on how many nodes the weights lie then, and Ray's plain copies of them."""
    weights = [("weights", torch.randn(WEIGHTS_MB * 250_000))]
    points = []
    for size in sizes:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": 4 * WEIGHTS_MB * 10**6, "include_dashboard": False},
        )
        try:
            for node in range(size):
                cluster.add_node(
                    num_cpus=0, object_store_memory=4 * WEIGHTS_MB * 10**6, resources={f"node{node}": NODE_ENGINES}
                )
            ray.init(address=cluster.address, log_to_driver=False)
            synced = measured_sync(size, weights, model_path)
            points.append({"size": size, **synced, "copy_seconds": measured_copies(size, weights)})
        finally:
            ray.shutdown()
            cluster.shutdown()
    return points


def measured_sync(num_nodes: int, weights: list[tuple[str, torch.Tensor]], model_path: str) -> Point:
    options = [
        {
            "num_cpus": 0,
            "resources": {f"node{index % num_nodes}": 1},
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": 0,
        }
        for index in range(NODE_ENGINES)
    ]
    engines = EnginePool(ray.remote(NullEngine), (model_path,), {"max_model_len": 128, "num_threads": 1}, options)
    try:
        engines.start(300)
        seconds, copies = [], 0
        for version in range(1 + REPEATS):
            packed = pack_weights(weights, version)
            began = time.perf_counter()
            engines.sync(packed)
            seconds.append(time.perf_counter() - began)
            places = ray.experimental.get_object_locations(packed.refs)
            copies = max(len(each["node_ids"]) for each in places.values())
        return {"seconds": min(seconds[1:]), "copies": copies - 1}  # without the sender's own
    finally:
        engines.stop()


@ray.remote(num_cpus=0)
class Reader:
    """A bare actor."""

    def read(self, refs: list[ObjectRef[Any]]) -> int:
        return len(ray.get(refs[0]))


def measured_copies(num_nodes: int, weights: list[tuple[str, torch.Tensor]]) -> float:
    """Seconds in which a bare actor on each node gets an object of the weights' bytes."""
    readers = [Reader.options(resources={f"node{node}": 1}).remote() for node in range(num_nodes)]
    seconds = []
    for _ in range(1 + REPEATS):
        ref = ray.put(weights[0][1].numpy())
        began = time.perf_counter()
        ray.get([reader.read.remote([ref]) for reader in readers])
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


PARTS = {
    "groups": grow_groups,
    "groups_overlapped": lambda sizes, model: grow_groups(sizes, model, max_staleness=1),
    "runners": lambda sizes, model: grow_actors("runners", sizes, model),
    "engines": lambda sizes, model: grow_actors("engines", sizes, model),
    "learners": grow_learners,
    "in_flight": in_flight,
    "nodes": grow_nodes,
}


def child(part: str, sizes: tuple[int, ...], model_path: str) -> list[Point]:
    """``part`` in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--model", model_path, "--sizes", *map(str, sizes)]
    began = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600, env=environment)
    print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    points: list[Point] = json.loads(done.stdout.splitlines()[-1])
    return points


def measured_before(path: Path | None) -> dict[str, list[Point]]:
    """The points of a report, where there is one."""
    if path is None or not path.is_file():
        return {}
    points: dict[str, list[Point]] = json.loads(path.read_text(encoding="utf-8"))["details"]["points"]
    return points


def measures_of(points: dict[str, list[Point]]) -> list[Measure]:
    """The lines of the table; of parts that were measured."""
    found = []
    for part, how in (("groups", ""), ("groups_overlapped", ", max_staleness=1")):
        if line := points.get(part):
            driver = [{"size": point["size"], "seconds": point["driver_cpu_s"]} for point in line]
            note = f"{values(line, 'driver_cpu_s')} CPU s at {sizes(line)} groups of 8 rollouts of 4 turns"
            name = f"driver's CPU with groups{how}, exponent"
            found.append(Measure(name, exponent(driver, "seconds"), "", 1.0, "lower", note))
            last = line[-1]
            phases = ", ".join(
                f"{name} {1e3 * value / last['size']:.2f}" for name, value in last["phases_cpu_s"].items()
            )
            per_group = 1e3 * last["driver_cpu_s"] / last["size"]
            name = f"driver's CPU a group, {last['size']} groups{how}"
            found.append(Measure(name, per_group, "ms", 2.0, "lower", f"of this: {phases} ms"))
    if line := points.get("runners"):
        ratio = line[-1]["driver_cpu_s"] / line[0]["driver_cpu_s"]
        note = f"{values(line, 'driver_cpu_s')} CPU s at {sizes(line)} env runners, {TASKS} groups"
        found.append(Measure("driver's CPU, most env runners over fewest", ratio, "x", 1.2, "lower", note))
    if line := points.get("in_flight"):
        point = line[-1]
        messages = 2 * point["exchanges"] / point["turns"]
        name = f"messages a turn, {point['size']} episodes in flight"
        note = f"{point['exchanges']:g} calls for {point['turns']:g} turns, one env runner, one engine"
        found.append(Measure(name, messages, "", 0.2, "lower", note))
        note = f"env runner {1e3 * point['runners_cpu_s'] / point['turns']:.2f} ms, of the engine's actor "
        note += f"{1e3 * point['engines_cpu_s'] / point['turns']:.2f} ms"
        cpu = 1e3 * (point["runners_cpu_s"] + point["engines_cpu_s"]) / point["turns"]
        found.append(Measure("CPU of ours a turn", cpu, "ms", 0.5, "lower", note))
    if line := points.get("engines"):
        per_turn = [2 * point["exchanges"] / point["turns"] for point in line]
        note = f"{', '.join(f'{each:.2f}' for each in per_turn)} at {sizes(line)} engines, 4 env runners"
        found.append(Measure("messages a turn, most engines", per_turn[-1], "", None, "lower", note))
    if line := points.get("learners"):
        last = line[-1]
        note = "; ".join(
            f"{point['size']} learners: {point['received_mb']:.2f} MB of {point['share_mb']:.2f} MB" for point in line
        )
        kinds = ", ".join(
            f"{kind} {1e3 * last[f'{kind}_mb']:.1f}" for kind in ("rows", "headers", "references", "exchanged")
        )
        note += f"; of the last, in KB: {kinds}"
        ratio = last["received_mb"] / last["share_mb"]
        found.append(Measure("bytes that a learner receives, over its share", ratio, "x", 1.2, "lower", note))
        ratio = last["driver_cpu_s"] / line[0]["driver_cpu_s"]
        note = f"{values(line, 'driver_cpu_s')} CPU s at {sizes(line)} learners"
        found.append(Measure("driver's CPU, most learners over one", ratio, "x", None, "lower", note))
    if line := points.get("nodes"):
        ratio = line[-1]["seconds"] / line[0]["seconds"]
        note = f"{values(line, 'seconds')} s at {sizes(line)} nodes, {NODE_ENGINES} engines, {WEIGHTS_MB} MB"
        found.append(Measure("weights to engines, most nodes over one", ratio, "x", 1.3, "lower", note))
        ratio = line[-1]["seconds"] / line[-1]["copy_seconds"]
        note = f"{values(line, 'copy_seconds')} s at {sizes(line)} nodes for one ray.get of the same bytes a node by a bare actor"
        found.append(Measure("the same on most nodes, over Ray's plain copies", ratio, "x", None, "lower", note))
        transfers = max(point["copies"] / point["size"] for point in line)
        found.append(Measure("transfers of the weights a node", transfers, "", 1.0, "lower"))
    return found


def values(line: list[Point], name: str) -> str:
    return ", ".join(f"{point[name]:.3g}" for point in line)


def sizes(line: list[Point]) -> str:
    return ", ".join(f"{point['size']:g}" for point in line)


def plot(points: dict[str, list[Point]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for quantity in ("groups", "runners", "engines", "learners"):
        if line := points.get(quantity):
            numbers = [point["size"] for point in line]
            axes[0].plot(numbers, [point["driver_cpu_s"] for point in line], marker="o", label=quantity)
    axes[0].set(xlabel="amount", ylabel="driver's CPU an iteration, s")
    if line := points.get("learners"):
        numbers = [point["size"] for point in line]
        axes[1].plot(numbers, [point["received_mb"] for point in line], marker="o", label="received, the most")
        axes[1].plot(numbers, [point["share_mb"] for point in line], marker="o", label="share of the batch")
        axes[1].set_xticks(numbers)
    axes[1].set(xlabel="learners", ylabel="MB a learner and iteration")
    if line := points.get("nodes"):
        numbers = [point["size"] for point in line]
        axes[2].plot(numbers, [point["seconds"] for point in line], marker="o", label="weights")
        axes[2].plot(numbers, [point["copy_seconds"] for point in line], marker="o", label="Ray's plain copies")
    axes[2].set(xlabel="nodes", ylabel="weights to all engines, s", ylim=(0, None))
    for axis in axes[:2]:
        ticks = axis.get_xticks() if axis is axes[1] else None
        axis.set(xscale="log", yscale="log")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(ScalarFormatter())
            side.set_minor_formatter(NullFormatter())
        axis.set_yticks([0.03, 0.1, 0.3] if ticks is None else [0.5, 1, 2, 3])
        if ticks is not None:
            axis.set_xticks(ticks)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write the growth as a picture (PNG)")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="the others stay as they are in the JSON file"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "nodes":
        print(json.dumps(PARTS[args.part](tuple(args.sizes), args.model)))
        return
    if args.part:
        with local_ray():
            print(json.dumps(PARTS[args.part](tuple(args.sizes), args.model)))
        return
    with tempfile.TemporaryDirectory(prefix="bench_control_plane-") as folder:
        model_path = save_model(Path(folder) / "nano")
        points = measured_before(args.json)
        try:
            for part in args.parts:
                points[part] = child(part, SIZES[part], model_path)
        finally:
            write_report(args.json, measures_of(points), {"points": points})
    if args.plot:
        plot(points, args.plot)


if __name__ == "__main__":
    main()

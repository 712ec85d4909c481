"""Soak: thousands of episodes while environments fail and actors are killed; is what every process holds flat, and all counted?

    make soak                                   # 5,000 episodes
    make soak ARGS="--episodes 1000 --minutes 10"

Writes ``soak.json``. A quantity is flat where its slope over the episodes after the first fifth is below its tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from fault_table import lost_rows
from nano_model import save_nano_model
from tiny_run import ChanceEnv, config_of
from user_env import registered

from trial_ray.runs.metric_files import flatten

LEARNER = "learners/default_policy/"
LOST_GROUPS = f"{LEARNER}rows/lost_groups"
COUNTED = {
    "episodes": ("env_runners/num_episodes", "env_runners/num_failed_episodes"),
    "episodes_failed": ("env_runners/num_failed_episodes",),
    **{f"rows_{name}": (f"rows/{name}",) for name in ("sampled", "given_to_learners", "left_out", "redrawn", "stale")},
    "rows_trained": (f"{LEARNER}num_module_steps_trained",),
    "rows_skipped": (f"{LEARNER}rows/skipped",),
    "groups_lost_after_sampling": (LOST_GROUPS,),
}
GROUPS, ROLLOUTS = 4, 8
FAILURE_RATE = 0.02
"""Share of the environments' steps that raise."""
KILL_EVERY = {"engines": 25, "env runners": 20}
"""Iterations between two kills of the younger one of the two actors of each kind; the moment in the iteration is drawn."""
WARM_UP = 0.2
"""Share of the episodes that are left out of the slopes: caches fill, libraries load."""
TOLERANCES = {"memory": 2.0, "shared": 2.0, "handles": 2.0, "threads": 1.0, "actors": 0.1}
"""Per 1,000 episodes: MiB, MiB, and numbers."""
OURS = ("driver and learner", "env runners", "engines", "actors")
"""Processes of this package, whose slopes must be flat; those of Ray's are reported."""
KINDS = {
    "ray::TextEnvRunner": "env runners",
    "ray::TransformersEngine": "engines",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "log_monitor": "log monitor",
    "agent": "Ray's agents",
    "monitor": "monitor",
}


def main() -> int:
    arguments = _parser().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2, object_store_memory=150_000_000, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        try:
            with registered(ChanceEnv):
                found = Soak(Path(folder), arguments.seed).run(arguments.episodes, 60 * arguments.minutes)
        finally:
            ray.shutdown()
    found["left_behind"] = len(psutil.Process().children(recursive=True))
    (arguments.out / "soak.json").write_text(json.dumps(found, indent=2) + "\n")
    print(_told(found))
    return 0 if all(found["passed"].values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=5000, help="episodes to play (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=240, help="stop after so long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder (default: %(default)s)")
    return parser


class Soak:
    """One run with faults, and what its processes held after each iteration."""

    def __init__(self, folder: Path, seed: int) -> None:
        model_path = str(save_nano_model(folder / "nano"))
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.requests: dict[int, dict[str, int]] = {}
        self.samples: list[dict[str, Any]] = []
        self.unbalanced: list[str] = []
        self.algo = (
            config_of(
                model_path, group_size=ROLLOUTS, tasks_per_iteration=GROUPS, minibatch_rows=64, microbatch_rows=32
            )
            .environment(ChanceEnv.ENV_ID, env_config={"split": "train", "failure_rate": FAILURE_RATE})
            .env_runners(seeded_sampling=False, max_group_redraws=4)
            .engines(num_engines=2, engine_kwargs={"num_threads": 1})
            .env_runners(num_env_runners=2, num_cpus_per_env_runner=0.25)
            .recording(trajectories_folder=str(folder / "trajectories"))
            .guards(guard_action="warn")
            .build_algo()
        )

    def run(self, episodes: int, seconds: float) -> dict[str, Any]:
        """Train until so many episodes were played or so much time has passed."""
        began = time.monotonic()
        try:
            while self.counts["episodes"] < episodes and time.monotonic() - began < seconds:
                self._iterate()
            engines = self.algo.engine_pool.replacements
        finally:
            self.algo.stop()
        self.counts["engines_replaced"] = engines
        return self._result(episodes, time.monotonic() - began)

    def _iterate(self) -> None:
        number = self.algo.iteration + 1
        killers = []
        self._note_requests()
        for kind, every in KILL_EVERY.items():
            if number % every == 0:
                killers.append(threading.Timer(self.draw.uniform(0.0, 1.0), self._kill, [kind]))
                killers[-1].start()
        result = self.algo.train()
        for killer in killers:
            killer.join(60)
        self._count(result)
        self._note_requests()
        self.samples.append({"episodes": self.counts["episodes"], "processes": self._processes(), "actors": _alive()})
        if number % 10 == 0:
            print(f"iteration {number}: {self.counts['episodes']} episodes, {dict(self.counts)}", flush=True)

    # -- faults ------------------------------------------------------------------------------------------------------

    def _kill(self, kind: str) -> None:
        found = [each for each in _children() if _kind(each) == kind]
        if len(found) == 2:  # else the one killed last is still being replaced
            # The other one lives as long as the run, and has slopes.
            os.kill(max(found, key=psutil.Process.create_time).pid, signal.SIGKILL)
            self.counts[f"{kind}_killed"] += 1

    # -- what is counted -----------------------------------------------------------------------------------------------

    def _count(self, result: dict[str, Any]) -> None:
        if not result["groups"]["num_trained"]:
            result = {**result, "learners": {}}  # those of the last update
        metrics = flatten(result)
        self.counts["iterations"] += 1
        for name, keys in COUNTED.items():
            self.counts[name] += int(sum(metrics.get(key, 0) for key in keys))
        if lost_rows(result) and not metrics.get(LOST_GROUPS):
            self.unbalanced.append(f"iteration {self.counts['iterations']}: {result['rows']}, {lost_rows(result)} lost")

    def _note_requests(self) -> None:
        """Between two iterations nothing is under way, so that all requests of every env runner have had their end."""
        reports = self.algo.env_runner_group.foreach_env_runner(
            lambda runner: {"pid": os.getpid(), **runner.report()}, local_env_runner=False, timeout_seconds=30
        )
        for report in reports:
            if "requests_sent" not in report:  # restarted, and not connected to any engine yet
                continue
            sent, ended = report["requests_sent"], report["requests_answered"] + report["requests_failed"]
            if sent != ended:
                self.unbalanced.append(f"iteration {self.counts['iterations']}: {sent} requests sent, {ended} ended")
            self.requests[report["pid"]] = {
                name: report[name] for name in report if name.startswith(("requests", "attempts"))
            }

    def _processes(self) -> dict[str, list[dict[str, float]]]:
        """What every process holds, by kind."""
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for process in [psutil.Process(), *_children()]:
            try:
                found[_kind(process)].append({"pid": process.pid, **_held(process.pid)})
            except (OSError, psutil.Error, KeyError):  # it has ended; a zombie's status names no memory
                continue
        return dict(found)

    # -- result ------------------------------------------------------------------------------------------------------------

    def _result(self, asked: int, seconds: float) -> dict[str, Any]:
        requests = sum((Counter(each) for each in self.requests.values()), Counter())
        slopes = _slopes(self.samples)
        return {
            "episodes_asked_for": asked,
            "seconds": round(seconds, 1),
            "counts": dict(self.counts) | requests,
            "unbalanced": self.unbalanced,
            "slopes_per_1000_episodes": slopes,
            "samples": self.samples,
            "passed": {
                "all_episodes": self.counts["episodes"] >= asked,
                "counted": not self.unbalanced,
                "flat": all(slope["flat"] for slope in slopes if slope["process"] in OURS),
            },
        }


def _children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.is_running()]


def _kind(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "driver and learner"
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        title = ""
    return next((kind for part, kind in KINDS.items() if part in title), "others")


def _held(pid: int) -> dict[str, float]:
    """Of a process: own memory and shared memory (that of /dev/shm) in MiB, file handles, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "memory": int(status["RssAnon"].split()[0]) / 1024,
        "shared": int(status["RssShmem"].split()[0]) / 1024,
        "handles": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
    }


def _alive() -> int:
    return sum(actor["State"] == "ALIVE" for actor in ray._private.state.actors().values())


def _slopes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every quantity of every process that lived long enough, and of the number of actors."""
    last = samples[-1]["episodes"] if samples else 0
    late = [sample for sample in samples if sample["episodes"] >= WARM_UP * last]
    series: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in late:
        series["actors", 0, "actors"].append((sample["episodes"], sample["actors"]))
        for kind, processes in sample["processes"].items():
            for process in processes:
                for name in ("memory", "shared", "handles", "threads"):
                    series[kind, process["pid"], name].append((sample["episodes"], process[name]))
    found = []
    for (kind, pid, name), points in series.items():
        if len(points) >= max(10, len(late) // 2):  # one that was replaced on the way has a slope over too little
            slope = float(np.polyfit(*np.array(points).T, 1)[0] * 1000)
            found.append(
                {"process": kind, "pid": pid, "quantity": name, "slope": slope, "flat": slope <= TOLERANCES[name]}
            )
    return found


def _told(found: dict[str, Any]) -> str:
    lines = [f"{found['counts']['episodes']} of {found['episodes_asked_for']} episodes in {found['seconds']:.0f} s"]
    lines += [f"  {name}: {value}" for name, value in found["counts"].items()]
    lines += ["slopes per 1,000 episodes:", *map(str, found["slopes_per_1000_episodes"])]
    return "\n".join([*lines, *found["unbalanced"], str(found["passed"])])


if __name__ == "__main__":
    raise SystemExit(main())

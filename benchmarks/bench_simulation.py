"""The simulation of a run against runs: seconds an iteration and idle shares, for settings that were not used to fit it.

    python benchmarks/bench_simulation.py --json benchmarks/results/simulation.json
    python benchmarks/bench_simulation.py --folder FOLDER --settings transformers-tasks4   # few; what FOLDER holds is not run again

For each engine and kind of games, speeds and lengths of rollouts come from one recorded run of 8 tasks an iteration, as
``trial-ray plan --simulate --recorded`` takes them. Every setting is a run in a process and a Ray of its own: a few iterations, of
which the first is not counted. Engines' idle shares are those of ``EngineUsage``, learners' those of the driver's clock.

The official games lie in a folder (``--data``, else ``ALFWORLD_DATA``, else ``TRIAL_TEST_DATA``); without one, generated games of
the official size stand in. Leaves out: CUDA, several machines.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_rollout import find_data
from local_ray import local_ray
from measure import Measure, write_report

from trial_ray.metrics import LEARNER
from trial_ray.planning.calibration import fit_rates
from trial_ray.planning.rates import Arrangement, Rates, Workload
from trial_ray.planning.simulation import SimulatedIteration, simulate
from trial_ray.runs.metric_files import flatten
from trial_ray.runs.recorded_workload import recorded_run

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "tuned_examples" / "alfworld_quickstart.py"
COMMAND = Path(sys.executable).with_name("trial-ray")
RECORDED_ITERATIONS, ITERATIONS, SIMULATED = 7, 5, 13
BASE: dict[str, Any] = {"hindsight_start_iteration": 1, "evaluation_split": None}
"""Of every run: all iterations alike, and nothing but training."""
MOST_ERROR, MOST_POINTS = 0.15, 5.0
TIMEOUT_S = 240.0
NODES = {"worker1": "per_engine", "worker2": "per_learner", "head": "per_env_runner"}


@dataclass(frozen=True)
class Setting:
    """A run: an engine, and what differs from the quickstart."""

    engine: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    official: bool = False
    nodes: bool = False

    @property
    def recording(self) -> str:
        """Folder of the run that its speeds come from."""
        return f"recorded-{self.engine}" + "-official" * self.official


SETTINGS = {
    "transformers-tasks4": Setting("transformers", {"tasks_per_iteration": 4}),
    "transformers-tasks20": Setting("transformers", {"tasks_per_iteration": 20}),
    "transformers-groups4": Setting("transformers", {"group_size": 4, "tasks_per_iteration": 12}),
    "transformers-runners2": Setting("transformers", {"num_env_runners": 2}),
    "transformers-overlapped": Setting("transformers", {"max_staleness": 1, "importance_cap": 2.0}),
    "transformers-learners2": Setting("transformers", {"num_learners": 2}),
    "transformers-official": Setting("transformers", {"tasks_per_iteration": 4}, official=True),
    "transformers-nodes3": Setting("transformers", {"num_learners": 1}, nodes=True),
    "vllm-tasks4": Setting("vllm", {"tasks_per_iteration": 4}),
    "vllm-tasks20": Setting("vllm", {"tasks_per_iteration": 20}),
    "vllm-overlapped": Setting("vllm", {"max_staleness": 1, "importance_cap": 2.0}),
    "vllm-official": Setting("vllm", {"tasks_per_iteration": 4}, official=True),
}


# ---- runs ----


def games_of(setting: Setting, data: str | None) -> dict[str, Any] | None:
    """``env_config`` of official games, or of generated ones of their size; ``None`` of the quickstart's own."""
    if not setting.official:
        return None
    games = {"split": "valid_seen", "data": data} if data else {"split": "generated", "difficulty": "official"}
    return {**games, "max_turns": 12}


def changes_of(setting: Setting) -> dict[str, Any]:
    """What differs from the quickstart, the games aside."""
    changes: dict[str, Any] = {**BASE, "engine": setting.engine}
    if setting.official:
        changes |= {"max_prompt_tokens": 1024, "history_window": 2}
    if setting.nodes:
        changes |= {f"num_cpus_{actor}": 0.2 for actor in (*NODES.values(), "for_main_process")}
    return {**changes, **setting.changes}


def config_of(setting: Setting, data: str | None) -> Any:
    """The quickstart's config with the setting's changes."""
    config, changes = runpy.run_path(str(QUICKSTART))["config"], changes_of(setting)
    if (games := games_of(setting, data)) is not None:
        config.environment("trial/ALFWorld-v0", env_config=games)
    if setting.nodes:
        changes |= {f"custom_resources_{actor}": {name: 0.1} for name, actor in NODES.items()}
    return config.update_from_dict(changes)


def record(setting: Setting, folder: Path, data: str | None) -> None:
    """Train the setting's games, 8 tasks an iteration, with the command line, for its run folder."""
    file = QUICKSTART
    if (games := games_of(setting, data)) is not None:
        file = folder.with_suffix(".py")
        load = f"import runpy\nconfig = runpy.run_path({str(QUICKSTART)!r})['config']\n"
        file.write_text(f"{load}config.environment('trial/ALFWorld-v0', env_config={games!r})\n", encoding="utf-8")
    plain = Setting(setting.engine, official=setting.official)
    words = [part for name, value in changes_of(plain).items() for part in ("--set", f"{name}={value}")]
    command = [str(COMMAND), "train", str(file), "--out", str(folder), "--iterations", str(RECORDED_ITERATIONS), *words]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


def measure(setting: Setting, folder: Path, data: str | None) -> None:
    """Train in this process, and write the metrics of each iteration with the seconds in which engines were busy."""
    import ray

    config = config_of(setting, data).recording(trajectories_folder=str(folder / "trajectories"))
    if setting.nodes:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        rows = _iterations(config)
    else:
        with local_ray():
            rows = _iterations(config)
    (folder / "iterations.json").write_text(json.dumps(rows), encoding="utf-8")


def _iterations(config: Any) -> list[dict[str, float]]:
    algo = config.build_algo()
    try:
        rows, before = [], _busy(algo)
        for _ in range(ITERATIONS):
            metrics = flatten(algo.train())
            now = _busy(algo)
            rows.append({**metrics, "engines_busy_s": now - before})
            before = now
    finally:
        algo.stop()
    return rows


def _busy(algo: Any) -> float:
    reports = algo.actor_reports()
    return sum(report["busy_seconds"] for name, report in reports.items() if name.startswith("engine"))


def measured_in_process(name: str, folder: Path, data: list[str]) -> None:
    """Measure a setting in a process of its own, on three local nodes where it asks for them."""
    command = [sys.executable, __file__, "--measure", name, "--folder", str(folder), *data]
    if not SETTINGS[name].nodes:
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        return
    sys.path.append(str(HERE.parent / "tests" / "support"))
    from ray_nodes import cluster_of

    with cluster_of("worker1", "worker2") as nodes:
        environment = {**nodes.environment, "RAY_ADDRESS": nodes.address}
        subprocess.run(command, check=True, timeout=TIMEOUT_S, env=environment)


# ---- comparison ----


def figures_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Measured means over the iterations but the first."""
    counted = rows[1:]
    seconds = sum(each["time_this_iter_s"] for each in counted)
    phases = {name: _mean([each[f"seconds/{name}"] for each in counted]) for name in ("sampling", "update", "sync")}
    return {
        "iteration": seconds / len(counted),
        **phases,
        "scoring": _mean([each[f"{LEARNER}scoring/seconds"] for each in counted]),
        "engines_idle": 1 - sum(each["engines_busy_s"] for each in counted) / seconds,
        "learners_idle": 1 - sum(each["seconds/update"] for each in counted) / seconds,
        "turns": _mean([each["env_runners/num_env_steps_sampled"] for each in counted]),
        "staleness": _mean([each[f"{LEARNER}rows/staleness_mean"] for each in counted]),
    }


def predicted(iterations: Sequence[SimulatedIteration]) -> dict[str, float]:
    """The same of a simulation."""
    counted = iterations[1:]
    seconds = sum(each.seconds for each in counted)

    def share(name: str) -> float:
        return sum(getattr(each, name) * each.seconds for each in counted) / seconds

    means = {name: _mean([getattr(each, name) for each in counted]) for name in ("sampling", "update", "sync")}
    return {
        "iteration": seconds / len(counted),
        **means,
        "scoring": _mean([each.scoring for each in counted]),
        "engines_idle": 1 - share("engines_busy"),
        "learners_idle": 1 - share("learners_busy"),
        "turns": _mean([each.turns for each in counted]),
        "staleness": _mean([each.staleness for each in counted]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def compare(name: str, folder: Path, rates: Rates, workload: Workload, data: str | None) -> dict[str, Any]:
    """Measured and predicted figures of a setting, and the errors."""
    setting = SETTINGS[name]
    rows = json.loads((folder / "iterations.json").read_text(encoding="utf-8"))
    arrangement = Arrangement.of(config_of(setting, data), os.cpu_count() or 1)
    run = simulate(workload, arrangement, rates, SIMULATED)
    found, expected = figures_of(rows), predicted(run.iterations)
    return {
        "setting": {"engine": setting.engine, **setting.changes, "official": setting.official, "nodes": setting.nodes},
        "measured": found,
        "predicted": expected,
        "iteration_error": expected["iteration"] / found["iteration"] - 1,
        "idle_points": {who: 100 * (expected[f"{who}_idle"] - found[f"{who}_idle"]) for who in ("engines", "learners")},
        "iterations": [each["time_this_iter_s"] for each in rows],
    }


def measures(results: Mapping[str, Mapping[str, Any]]) -> list[Measure]:
    """The lines of the table of all benchmarks: the settings with the largest errors."""
    errors = {name: abs(each["iteration_error"]) for name, each in results.items()}
    points = {name: max(map(abs, each["idle_points"].values())) for name, each in results.items()}
    found = []
    for what, values, unit, most in (
        ("simulated iteration", errors, "", MOST_ERROR),
        ("simulated idle shares", points, "points", MOST_POINTS),
    ):
        worst, met = max(values, key=values.__getitem__), sum(value <= most for value in values.values())
        note = f"{worst}; {met} of {len(values)} settings within the target"
        found.append(Measure(f"{what}, largest error", values[worst], unit, most, "lower", note))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--folder", type=Path, help="of the runs; those that it holds are not run again")
    parser.add_argument("--data", default=None, help="folder of the official games")
    parser.add_argument("--measure", choices=list(SETTINGS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    data = find_data(args.data)
    if args.measure:
        measure(SETTINGS[args.measure], args.folder, data)
        return
    with tempfile.TemporaryDirectory(prefix="simulation-") as temporary:
        folder = args.folder or Path(temporary)
        results, rates = compare_all(args.settings, folder, data)
    errors = [abs(each["iteration_error"]) for each in results.values()]
    print(f"median error of an iteration {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    details = {
        "rates": {name: asdict(each) for name, each in rates.items()},
        "official_games": data is not None,
        "results": results,
    }
    write_report(args.json, measures(results), details)


def compare_all(
    names: Sequence[str], folder: Path, data: str | None
) -> tuple[dict[str, dict[str, Any]], dict[str, Rates]]:
    """Run what the folder does not hold, and compare each setting with its prediction; also returns speeds by recording."""
    recorded: dict[str, tuple[Rates, Workload]] = {}
    results = {}
    for name in names:
        setting, run = SETTINGS[name], folder / name
        if setting.recording not in recorded:
            recording = folder / setting.recording
            if not _is_done(recording):
                shutil.rmtree(recording, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
                record(setting, recording, data)
            found = recorded_run(recording)
            recorded[setting.recording] = fit_rates(found), found.workload
        if not (run / "iterations.json").is_file():
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir(parents=True)
            measured_in_process(name, folder / name, [] if data is None else ["--data", data])
        results[name] = compare(name, run, *recorded[setting.recording], data)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    return results, {name: rates for name, (rates, _) in recorded.items()}


def _is_done(recording: Path) -> bool:
    """Whether a run folder is there, of a run that has ended."""
    file = recording / "run.json"
    return file.is_file() and json.loads(file.read_text(encoding="utf-8"))["state"] == "done"


if __name__ == "__main__":
    main()

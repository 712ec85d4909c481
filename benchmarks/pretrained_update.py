"""What prefix tree, bfloat16 and adapters save in an update of a pretrained model, each left out alone, then all together.

    trial-ray reproduce pair --scale pretrained --out runs/pair
    python benchmarks/pretrained_update.py runs/pair/runs/alfworld-smollm2-135m-trial-seed0 \\
        --json benchmarks/results/pretrained_update.json

Rollouts are those of the run's first iteration, whose weights are the warm start's; the dense loss is on. Times are medians of
rounds in which all variants run in turn, scoring of both contexts included. Leaves out: the optimizer's step, and sampling.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from learners import BenchLearner
from measure import Measure, interleaved, seconds_note, seconds_of, speedup, write_report

from trial_ray.algorithms.initial_policy import initial_policy
from trial_ray.environments.registry import load_adapters
from trial_ray.learner import packing
from trial_ray.learner.recording import UpdateRecord
from trial_ray.models.layout import layout_of
from trial_ray.rollout.recording import read_groups
from trial_ray.runs.config_record import load_record
from trial_ray.runs.folder import CONFIG_FILE, RunFolder

AS_RUN = "as the run"
VARIANTS: dict[str, dict[str, Any]] = {
    AS_RUN: {},
    "padded rows": {"padded": True},
    "float32": {"compute_dtype": None},
    "all weights trained": {"lora_rank": None},
    "all three": {"padded": True, "compute_dtype": None, "lora_rank": None},
}


def updater(config: Any, groups: Any, padded: bool = False, **module: Any) -> Callable[[], float]:
    """Scores and trains on the groups, and returns the seconds.

    Args:
        config: the run's, with the model that it began from.
        groups: the rollouts.
        padded: rows are padded, not put into trees.
        module: settings of ``rl_module`` in place of the run's.
    """
    learner = BenchLearner(config.copy(copy_frozen=False).rl_module(**module))

    def update() -> float:
        padding = replace(layout_of(learner.lm), rows="padded")
        with mock.patch.object(packing, "layout_of", lambda lm: padding if padded else layout_of(lm)):
            return seconds_of(lambda: learner.update(groups, iteration=config.hindsight_start_iteration))

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of TRIAL")
    parser.add_argument("--env-adapter", type=Path, action="append", default=[], dest="env_adapters")
    parser.add_argument("--groups", type=int, default=1, help="of the iteration's, so many are taken")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run, adapters = RunFolder(arguments.run), load_adapters(arguments.env_adapters)
    ids = UpdateRecord.read(run.training, 1).group_ids[: arguments.groups]
    groups = read_groups(run.trajectories, ids, 1)
    config = load_record(run.path / CONFIG_FILE, adapters)
    config.rl_module(model_path=initial_policy(config), warm_start=None).learners(num_learners=0)
    config.recording(trajectories_folder=None, training_folder=None)
    variants = {name: updater(config, groups, **settings) for name, settings in VARIANTS.items()}
    times = interleaved(variants, arguments.rounds, warm_up=False)
    rows = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
    note = f"{rows} rows: {seconds_note(times)}"
    measures = [
        Measure(f"update of SmolLM2-135M, {name}: time over the run's", speedup(times, AS_RUN, name), note=note)
        for name in VARIANTS
        if name != AS_RUN
    ]
    write_report(arguments.json, measures, {"rows": rows, "seconds": times, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()

"""How much of a profile's weight falls on wasted turns? Recorded rollouts of trained runs, played again beside the demonstrator.

python benchmarks/wasted_turns.py runs/reproduce-shape/runs/*-trial-* --env-adapter tuned_examples/reproduce/study.py --every 5 \
  --json docs/results/shape_weights.json

A turn is wasted where the demonstrator, who reads what the policy reads, would have done something else (`trial-ray judge`).
Of every run: the share of its turns that are wasted, their share of the turn weights w_k, and of the dense loss's pushes
w_k Σ|Δ|; the share of the push on planned and on wasted turns that goes the right way; the AUC of their gap.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from trial_ray.environments.adapter import begin, plan
from trial_ray.environments.guarded import GuardedEnv
from trial_ray.environments.registry import load_adapters
from trial_ray.files import write_json
from trial_ray.reports.recorded import RecordedTrajectory, read_recorded
from trial_ray.runs.config_record import load_method, load_record
from trial_ray.runs.folder import CONFIG_FILE, RunFolder
from trial_ray.warmstart.demonstrations import make_demonstrator
from trial_ray.warmstart.judgement import GAP_CLIP, auc


@dataclass(frozen=True, slots=True)
class Turn:
    """One trained turn: whether it is wasted, its weight, and its tokens' gaps, clipped, in nats."""

    wasted: bool
    weight: float
    gap: np.ndarray


def turns_of(recorded: RecordedTrajectory, env: GuardedEnv, demonstrator: Any) -> Iterator[Turn]:
    """The trajectory's trained turns.

    Raises:
        ValueError: the game, played again, answers something else than was recorded.
    """
    trajectory = recorded.trajectory
    result = env.reset(trajectory.task_id, 0)
    begin(demonstrator, result.task, result.observation, 0, env.walkthrough)
    for turn, trained in zip(trajectory.turns, recorded.trained, strict=True):
        if result.observation != turn.observation:
            raise ValueError(f"{trajectory.task_id}: found {result.observation!r}, recorded {turn.observation!r}")
        _, planned = plan(demonstrator, result.observation, result.admissible_actions)
        if trained is not None and trained.gap:
            weight = 1.0 if trained.turn_weight is None else trained.turn_weight
            yield Turn(turn.action not in planned, weight, np.clip(trained.gap, -GAP_CLIP, GAP_CLIP))
        demonstrator.carried_out(turn.action)
        result = env.step(turn.action)


def figures(turns: list[Turn]) -> dict[str, Any]:
    """Shares of turns, weights and pushes; see the head of this file."""
    wasted, weights = np.array([turn.wasted for turn in turns]), np.array([turn.weight for turn in turns])
    signed = np.array([turn.gap.sum() for turn in turns])
    sizes = np.array([np.abs(turn.gap).sum() for turn in turns])
    right = (sizes + np.where(wasted, -signed, signed)) / 2
    found = {"wasted": wasted.mean(), "weight_on_wasted": weights[wasted].sum() / weights.sum()}
    found["push_on_wasted"] = (weights * sizes)[wasted].sum() / (weights * sizes).sum()
    for name, kind in (("planned", ~wasted), ("wasted", wasted)):
        found[f"right_on_{name}"] = (weights * right)[kind].sum() / (weights * sizes)[kind].sum()
    found["auc_wasted"] = auc(-np.array([turn.gap.mean() for turn in turns]), wasted)
    shares = {name: None if value is None else float(value) for name, value in found.items()}
    return {"turns": len(turns), **shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of methods with a hindsight view")
    parser.add_argument("--env-adapter", type=Path, action="append", default=[], dest="env_adapters")
    parser.add_argument("--every", type=int, default=1, help="take iterations N, 2 N, … (default: all)")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    adapters, rows = load_adapters(arguments.env_adapters), []
    for folder in track(arguments.runs):
        run = RunFolder(folder)
        config = load_record(folder / CONFIG_FILE, adapters)
        (entry,) = config.environment_entries()
        demonstrator, turns = make_demonstrator(entry), list[Turn]()
        with closing(GuardedEnv(entry)) as env:
            for iteration in run.recorded_iterations():
                if iteration % arguments.every == 0:
                    for recorded in read_recorded(folder, iteration, 0, {}):
                        turns += turns_of(recorded, env, demonstrator)
        rows.append(
            {"run": folder.name, "method": load_method(folder / CONFIG_FILE), "seed": config.seed, **figures(turns)}
        )
    print(write_json(arguments.json, {"every": arguments.every, "runs": rows}))


if __name__ == "__main__":
    main()

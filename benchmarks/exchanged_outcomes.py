"""Does the hindsight view judge by the outcome that it shows? AUC of wasted turns with each turn's own outcome and with another's.

python benchmarks/exchanged_outcomes.py package:alfworld-tiny --env-adapter tuned_examples/reproduce/study.py
python benchmarks/exchanged_outcomes.py ~/.cache/trial_ray/warmstart/KEY --env-adapter tuned_examples/reproduce/webshop.py

The model plays the same held-out games twice. In the second pass every turn is scored with the outcome of another turn of its
episode: an AUC that stays says that the model was cloned to plan without waste wherever it sees an outcome, whatever it shows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from trial_ray.environments.registry import load_adapters
from trial_ray.models.packaged import packaged_folder
from trial_ray.rollout.trajectory import Trajectory
from trial_ray.warmstart import judgement
from trial_ray.warmstart.demonstrations import outcome_evidence
from trial_ray.warmstart.policy import recorded_settings


def exchanged(random: np.random.Generator) -> Callable[[Trajectory, Any], list[np.ndarray]]:
    """The outcome views of an episode's turns, each of another turn than its own where there are several."""

    def views(trajectory: Trajectory, tokenizer: Any) -> list[np.ndarray]:
        own = outcome_evidence(trajectory, tokenizer)
        count = len(own)
        others = [(turn + 1 + int(random.integers(count - 1))) % count for turn in range(count)] if count > 1 else [0]
        return [own[other] for other in others]

    return views


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a warm start's model, or package:alfworld-tiny")
    parser.add_argument("--env-adapter", type=Path, action="append", default=[], dest="env_adapters")
    parser.add_argument(
        "--generator-seed", type=int, help="of the games; default: those that the warm start was evaluated on"
    )
    arguments = parser.parse_args()
    folder = (
        packaged_folder(arguments.model)
        if arguments.model.startswith("package:")
        else Path(arguments.model).expanduser()
    )
    settings = replace(recorded_settings(folder), model_path=str(folder))
    if arguments.generator_seed is not None:
        settings = replace(settings, generator_seed=arguments.generator_seed)
    adapters = load_adapters(arguments.env_adapters)
    for name, views in (("own outcome", outcome_evidence), ("another turn's", exchanged(np.random.default_rng(0)))):
        with mock.patch.object(judgement, "outcome_evidence", views):
            print(f"{name}: {judgement.judge_model(settings, adapters)}", flush=True)


if __name__ == "__main__":
    main()

"""Peak memory of a learner against what `trial-ray plan` predicts, for the models that a CPU trains.

    python benchmarks/bench_plan.py --json benchmarks/results/plan.json

One update in a process of its own on synthetic rows that fill the configuration's forward passes. Leaves out: engines, GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from measure import Measure, write_report

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
MEASURED = {"tiny": "alfworld_quickstart", "135M": "alfworld_smollm2_135m"}
"""Experiment files by the name of their model's size."""
TRAJECTORIES = 4


def config_of(name: str):
    from trial_ray.runs.experiment import load_experiment

    return load_experiment(EXAMPLES / f"{MEASURED[name]}.py").config


def synthetic_groups(config, vocabulary: int):
    """One minibatch of rows without common prefixes, each as long as a pass allows that holds a whole microbatch."""
    from trial_ray.rollout.trajectory import Trajectory, TrajectoryGroup, Turn

    rng = np.random.default_rng(0)
    limit = config.max_prompt_tokens + config.max_response_tokens
    length = min(limit, config.max_tokens_per_forward // config.microbatch_rows)

    def turn() -> Turn:
        ids = rng.integers(10, vocabulary, length).astype(np.int32)
        prompt, response = np.split(ids, [length - config.max_response_tokens])
        return Turn(
            prompt_ids=prompt,
            response_ids=response,
            logprobs=np.full(len(response), -5.0, np.float32),
            weight_version=1,
            insert_at=len(prompt) - 1,
            observation="You are in a room.",
            action="look",
            valid=True,
            outcome="Nothing happens.",
            reward=0.0,
            finish_reason="stop",
        )

    turns = max(1, config.minibatch_rows // TRAJECTORIES)
    return [
        TrajectoryGroup(
            f"task {group}",
            [
                Trajectory(
                    f"task {group}", "look", rollout, [turn() for _ in range(turns)], bool(rollout), float(rollout)
                )
                for rollout in range(2)
            ],
        )
        for group in range(TRAJECTORIES // 2)
    ]


def measure(name: str, model_path: str) -> dict:
    """Peak of this process over one update."""
    import torch

    from trial_ray.process_reports import peak_memory
    from trial_ray.rollout.env_runner import TextEnvRunner

    config = config_of(name).rl_module(model_path=model_path)
    config.training(max_logprob_gap=1e9)  # the log-probabilities are synthetic
    spec = config.get_multi_rl_module_spec(spaces=TextEnvRunner.get_spaces(None))
    learner = config.get_default_learner_class()(config=config, module_spec=spec)
    before = peak_memory()["host_bytes"]
    learner.build()
    groups = synthetic_groups(config, learner.policy_module.lm.config.vocab_size)
    learner.update(episodes=groups, timesteps={"training_iteration": 1})
    return {
        "rows": sum(len(group) for group in groups),
        "row_tokens": groups[0].trajectories[0].turns[0].num_tokens,
        "threads": torch.get_num_threads(),
        "process_bytes": before,
        "measured_bytes": peak_memory()["host_bytes"],
    }


def compare(name: str) -> dict:
    """Prediction and measurement of one experiment, the latter in a process that has done nothing else."""
    from trial_ray.algorithms.initial_policy import initial_policy
    from trial_ray.planning.learner import learner_memory
    from trial_ray.planning.request import PlanRequest

    command = [sys.executable, __file__, "--measure", name, initial_policy(config_of(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    predicted = learner_memory(PlanRequest.of(config_of(name)))
    measured = json.loads(done.stdout.splitlines()[-1])
    return {
        "experiment": MEASURED[name],
        **measured,
        "predicted_bytes": round(predicted.total),
        "predicted_over_measured": predicted.total / measured["measured_bytes"],
        "items": {item: round(size) for item, size in predicted.items.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "FOLDER"), help="measure in this process, print JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    result = {name: compare(name) for name in args.models}
    write_report(args.json, measures(result), result)


def measures(result: dict) -> list[Measure]:
    """The lines of the table of all benchmarks."""
    return [
        Measure(
            f"plan of {each['experiment']}: predicted against measured peak memory, off by",
            100 * abs(each["predicted_over_measured"] - 1),
            "%",
            20,
            "lower",
            f"{each['predicted_bytes'] / 1e9:.2f} GB against {each['measured_bytes'] / 1e9:.2f} GB",
        )
        for each in result.values()
    ]


if __name__ == "__main__":
    main()

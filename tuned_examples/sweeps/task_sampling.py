"""Uniform task sampling against sampling by success rate, GRPO with eight seeds each on 256 tasks.

    trial-ray sweep tuned_examples/sweeps/task_sampling.py --out DIR     # 16 trials; --resume DIR continues
    python docs/results/task_sampling.py DIR                             # the differences, paired by seed

The policy, games and settings are the quickstart's. 96 iterations of 8 tasks draw each task three times on average; after
every eighth iteration the policy plays 256 other games.
"""

import runpy
from pathlib import Path

from ray import tune

from trial_ray.algorithms.methods import with_method

_quickstart = runpy.run_path(str(Path(__file__).parents[1] / "alfworld_quickstart.py"))["config"]
config = (
    with_method(_quickstart, "grpo")
    .environment(env_config={**_quickstart.env_config, "num_games": 256})
    .training(task_sampling=tune.grid_search(["uniform", "success_rate"]))
    # The driver plays and learns, which saves a process a trial.
    .env_runners(num_env_runners=0)
    .engines(engine="transformers", num_cpus_per_engine=0.4)
    .learners(num_cpus_per_learner=0.3)
    .resources(num_cpus_for_main_process=0.3)
    .evaluation(evaluation_interval=8)
    .debugging(seed=tune.grid_search(list(range(8))))
)
stop = {"training_iteration": 96}
metric, mode = "evaluation/env_runners/success_rate", "max"

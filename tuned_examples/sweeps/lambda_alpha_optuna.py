"""Optuna searches λ, α and the learning rate of the quickstart's tiny policy: each suggestion is the mean of two seeds.

pip install optuna==5.0.0
trial-ray sweep tuned_examples/sweeps/lambda_alpha_optuna.py
"""

import runpy
from pathlib import Path

from ray import tune
from ray.tune.search.optuna import OptunaSearch

config = (
    runpy.run_path(str(Path(__file__).parents[1] / "alfworld_quickstart.py"))["config"]
    .training(
        lr=tune.loguniform(1e-4, 1e-3),
        hindsight_coeff=tune.loguniform(1e-2, 1.0),
        clamp_alpha=tune.uniform(0.25, 2.0),
        hindsight_start_iteration=2,
    )
    .engines(engine="transformers")
    .debugging(seed=tune.grid_search([0, 1]))
)
stop = {"training_iteration": 20}
metric, mode = "env_runners/success_rate", "max"
num_samples = 12
search_alg = OptunaSearch(seed=0)

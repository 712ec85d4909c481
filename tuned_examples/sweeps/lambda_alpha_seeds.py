"""λ × α with three seeds a point, with early stopping by ASHA; the report's table and map show means with intervals.

    trial-ray sweep tuned_examples/sweeps/lambda_alpha_seeds.py

The 12 trials train the quickstart's tiny policy; the worse ones end after 4 or 12 iterations.
"""

import runpy
from pathlib import Path

from ray import tune
from ray.tune.schedulers import ASHAScheduler

config = (
    runpy.run_path(str(Path(__file__).parents[1] / "alfworld_quickstart.py"))["config"]
    .training(
        hindsight_coeff=tune.grid_search([0.03, 0.3]),
        clamp_alpha=tune.grid_search([0.5, 1.0]),
        hindsight_start_iteration=2,
    )
    .engines(engine="transformers")
    .debugging(seed=tune.grid_search([0, 1, 2]))
)
stop = {"training_iteration": 30}
metric, mode = "env_runners/success_rate", "max"
scheduler = ASHAScheduler(time_attr="training_iteration", grace_period=4, reduction_factor=3, max_t=30)

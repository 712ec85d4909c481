"""Population-based training: four policies learn at once, and the worst copies the best with a changed λ and learning rate.

    trial-ray sweep tuned_examples/sweeps/population.py

Members that do not fit at the same time take turns.
"""

import runpy
from pathlib import Path

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

config = (
    runpy.run_path(str(Path(__file__).parents[1] / "alfworld_quickstart.py"))["config"]
    .training(
        lr=tune.loguniform(1e-4, 1e-3),
        hindsight_coeff=tune.loguniform(1e-2, 1.0),
        hindsight_start_iteration=2,
    )
    .engines(engine="transformers")
)
stop = {"training_iteration": 30}
metric, mode = "env_runners/success_rate", "max"
num_samples = 4
scheduler = PopulationBasedTraining(
    time_attr="training_iteration",
    perturbation_interval=5,
    hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-3), "hindsight_coeff": tune.loguniform(1e-2, 1.0)},
)

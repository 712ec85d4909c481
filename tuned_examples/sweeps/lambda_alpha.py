"""λ × α on the quickstart's tiny policy: four trials of two iterations, which test the sweep and give no result.

    trial-ray sweep tuned_examples/sweeps/lambda_alpha.py
    trial-ray sweep tuned_examples/sweeps/lambda_alpha.py --iterations 30

Each trial reserves its engine inside its own placement group. The transformers engine starts faster than vLLM, which matters for
trials this short; for larger sweeps on GPUs use `--set engine=vllm`.
"""

import runpy
from pathlib import Path

from ray import tune

config = (
    runpy.run_path(str(Path(__file__).parents[1] / "alfworld_quickstart.py"))["config"]
    .training(
        hindsight_coeff=tune.grid_search([0.03, 0.3]),
        clamp_alpha=tune.grid_search([0.5, 1.0]),
        hindsight_start_iteration=1,
        tasks_per_iteration=4,
    )
    .engines(engine="transformers")
)
stop = {"training_iteration": 2}
metric, mode = "env_runners/success_rate", "max"

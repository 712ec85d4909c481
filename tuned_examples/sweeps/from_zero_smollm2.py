"""Trains SmolLM2-135M-Instruct with tools by GRPO, after fine-tuning on an expert's episodes; two seeds at once on two CPU cores.

    trial-ray sweep sweeps/from_zero_smollm2 --method grpo --set model_path=models/start

alfworld_smollm2_tools.py has the commands that make `models/start`. docs/results.md has the results, "From zero with a pretrained
model".
"""

from ray import tune

from trial_ray.runs.experiment import experiment_file, load_experiment

EXPERIMENT = load_experiment(experiment_file("alfworld_smollm2_tools"))

config = (
    EXPERIMENT.config.copy(copy_frozen=False)
    .evaluation(evaluation_interval=EXPERIMENT.stop["training_iteration"])
    .debugging(seed=tune.grid_search([0, 1]))
)
stop = EXPERIMENT.stop

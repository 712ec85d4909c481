"""Does the gate keep GRPO's improvement if hindsight opposes it? The rooms of tuned_examples/key_rooms.py.

    trial-ray reproduce gate --scale key_rooms --dry-run
    trial-ray reproduce gate --scale key_rooms            # 24 runs; the same command continues

λ and all other settings are those of the example. The gate's rule was chosen on runs from the example's warm start and a second
one; this one has demonstrated games, initial weights, order of examples and sampling of its own.
"""

import dataclasses

from trial_ray.reproduction import EvaluationSet, load_scale
from trial_ray.runs.experiment import experiment_file, load_experiment

SHOP = load_scale("webshop")  # as many iterations, and schedules that fit into them
KEY_ROOMS = load_experiment(experiment_file("key_rooms")).config


def configure(environment, backbone):
    config = KEY_ROOMS.copy(copy_frozen=False)
    return (
        config.rl_module(warm_start={**config.warm_start, "seed": 3, "generator_seed": 1_003_003, "threads": 1})
        # The driver plays and learns: one process fewer, and the runs are many.
        .env_runners(num_env_runners=0)
        .engines(num_cpus_per_engine=0.4)
        .learners(num_cpus_per_learner=0.3)
        .resources(num_cpus_for_main_process=0.3)
    )


scale = dataclasses.replace(
    SHOP,
    configure=configure,
    environments={"key_rooms": (EvaluationSet("test", 192),)},
    backbones=("mini-3",),
    controlled_backbone="mini-3",
    seeds=8,
)

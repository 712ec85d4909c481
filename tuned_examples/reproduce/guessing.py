"""The controlled comparison in a custom environment: the guessing game of tuned_examples/own_environment.py.

    trial-ray sweep shape --scale guessing --dry-run
    trial-ray sweep shape --scale guessing            # 32 runs; the same command continues

λ has the value that the scale `study` chose in ALFWorld; nothing was tuned on this game.
"""

import dataclasses

from trial_ray.runs.experiment import experiment_file, load_experiment
from trial_ray.sweeps.study import EvaluationSplit, load_scale

SHOP = load_scale("webshop")  # Inherit the number of iterations and the methods' schedules for it.
GUESSING = load_experiment(experiment_file("own_environment")).config


def configure(environment, backbone):
    config = GUESSING.copy(copy_frozen=False)
    warm_start = {**config.warm_start, "hindsight_fraction": 0.5, "threads": 1}
    return (
        config.rl_module(warm_start=warm_start)
        .training(hindsight_coeff=0.1, hindsight_start_iteration=SHOP.iterations // 6)
        # The driver plays and learns, which saves a process a run.
        .env_runners(num_env_runners=0)
        .engines(num_cpus_per_engine=0.4)
        .learners(num_cpus_per_learner=0.3)
        .resources(num_cpus_for_main_process=0.3)
    )


scale = dataclasses.replace(
    SHOP, configure=configure, environments={"guessing": (EvaluationSplit("test", 256),)}, seeds=8
)

"""The dose of hindsight in key rooms: five values of λ, 0 among them, with 8 seeds each, on two CPU cores.

    trial-ray sweep tuned_examples/sweeps/dose_key_rooms.py
    trial-ray sweep tuned_examples/sweeps/dose_key_rooms.py --set hindsight_coeff=0.1 --set clamp_alpha=0.3

The second command trains 8 seeds with one λ and another α. Every trial plays 192 held-out games after its last iteration.
docs/results.md has the results, "The dose of hindsight".
"""

from ray import tune

from trial_ray.runs.experiment import experiment_file, load_experiment

KEY_ROOMS = load_experiment(experiment_file("key_rooms"))

config = (
    KEY_ROOMS.config.copy(copy_frozen=False)
    .training(hindsight_coeff=tune.grid_search([0.0, 0.003, 0.01, 0.03, 0.1]))
    # The driver plays and learns, which saves a process a trial.
    .env_runners(num_env_runners=0)
    .engines(num_cpus_per_engine=0.4)
    .learners(num_cpus_per_learner=0.3)
    .resources(num_cpus_for_main_process=0.3)
    .evaluation(evaluation_interval=KEY_ROOMS.stop["training_iteration"])
    .debugging(seed=tune.grid_search(list(range(8))))
)
stop = KEY_ROOMS.stop

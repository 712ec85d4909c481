"""The dose of hindsight in ALFWorld: five values of λ, 0 among them, with 8 seeds each, on two CPU cores.

    trial-ray sweep tuned_examples/sweeps/dose_alfworld.py
    trial-ray sweep tuned_examples/sweeps/dose_alfworld.py --set hindsight_coeff=0.1 --set clamp_alpha=0.3

The second command trains 8 seeds with one λ and another α. Settings are those of the scale `study`
(tuned_examples/reproduce/study.py); every trial plays the study's held-out games after its last iteration.
docs/results.md has the results, "The dose of hindsight".
"""

from ray import tune

from trial_ray.sweeps.study import load_scale

STUDY = load_scale("study")

config = (
    STUDY.configure("alfworld", "mini")
    .training(hindsight_coeff=tune.grid_search([0.0, 0.003, 0.01, 0.03, 0.1]))
    .evaluation(evaluation_interval=STUDY.iterations)
    .debugging(seed=tune.grid_search(list(range(8))))
)
stop = {"training_iteration": STUDY.iterations}

"""The dose of hindsight in WebShop: five values of λ, 0 among them, with 8 seeds each, on two CPU cores.

    trial-ray sweep tuned_examples/sweeps/dose_webshop.py

Settings are those of the scale `webshop` (tuned_examples/reproduce/webshop.py); every trial plays 256 goals of another shop after
its last iteration. docs/results.md has the results, "The dose of hindsight".
"""

from ray import tune

from trial_ray.sweeps.study import load_scale

STUDY = load_scale("webshop")

config = (
    STUDY.configure("webshop", "mini")
    .training(hindsight_coeff=tune.grid_search([0.0, 0.003, 0.01, 0.03, 0.1]))
    .evaluation(evaluation_interval=STUDY.iterations)
    .debugging(seed=tune.grid_search(list(range(8))))
)
stop = {"training_iteration": STUDY.iterations}

"""Does the profile's shape matter? The scale `study` with four more warm starts, its λ, and no further tuning.

    trial-ray sweep shape --scale shape --dry-run
    trial-ray sweep shape --scale shape           # 128 runs, hours; the same command continues

Warm starts differ in demonstrated games, initial weights, order of examples and sampling. The warm start of `study` is the first
of the five that docs/results.md compares.
"""

import dataclasses

from trial_ray.sweeps.study import load_scale

STUDY = load_scale("study")
WARM_STARTS = {"mini-2": 2, "mini-3": 3, "mini-4": 4, "mini-5": 5}


def configure(environment, backbone):
    config = STUDY.configure(environment, backbone)
    number = WARM_STARTS[backbone]
    # Games of the cloning, its checks and its final evaluation have consecutive seeds from generator_seed on.
    warm_start = {**config.warm_start, "seed": number, "generator_seed": 1_000_003 + 1000 * number}
    return config.rl_module(warm_start=warm_start)


scale = dataclasses.replace(STUDY, configure=configure, backbones=tuple(WARM_STARTS), controlled_backbone="mini-2")

"""The controlled comparison of the scale `study` in WebShop: generated shops of the level `tiny`, same trainer, two CPU cores.

    trial-ray sweep shape --scale webshop --dry-run
    trial-ray sweep shape --scale webshop               # 32 runs; the same command continues
    trial-ray evaluate MODEL --hindsight --env-adapter tuned_examples/reproduce/webshop.py   # MODEL: folder of its warm start

λ is 0.1 for every profile, the value that the scale `study` chose for each profile in ALFWorld. Only the warm start was chosen on
shops, by its success and by how well it judges in hindsight, on separate goals.
"""

import dataclasses

from trial_envs.webshop.assortment import KINDS
from trial_envs.webshop.forgetful import ForgetfulExplorer
from trial_ray.adapters import webshop
from trial_ray.sweeps.study import EvaluationSplit, Scale, load_scale

ITERATIONS = 20
# One product of each kind: with several, a model of this size guesses ids that the page does not list (docs/warmstart.md).
SHOP = {"difficulty": "tiny", "max_turns": 12, "num_shops": 40, "num_products": len(KINDS)}
ADAPTER = dataclasses.replace(
    webshop.ADAPTER, warm_start=dataclasses.replace(webshop.ADAPTER.warm_start, demonstrator=ForgetfulExplorer)
)
STUDY = load_scale("study")


def configure(environment, backbone):
    config = STUDY.configure("alfworld", backbone)
    warm_start = {
        **config.warm_start,
        "env_config": SHOP,
        "suboptimal_probability": 0.4,
        "max_steps": 1600,
        "check_every": 1600,
    }
    return (
        config.environment(
            "trial/WebShop-v0",
            env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **SHOP},
            adapter=ADAPTER,
        )
        .rl_module(warm_start=warm_start)
        .training(hindsight_coeff=0.1, hindsight_start_iteration=ITERATIONS // 6)
    )


scale = Scale(
    configure=configure,
    environments={"webshop": (EvaluationSplit("generated"),)},
    backbones=("mini",),
    controlled_backbone="mini",
    iterations=ITERATIONS,
    seeds=8,
    method_settings={
        **{
            method: {"rescaling_iterations": ITERATIONS // 3, "teacher_sync_iterations": 2}
            for method in ("serl", "stepopsd")
        },
        "rlsd": {"rescaling_iterations": 2 * ITERATIONS // 3},
    },
)

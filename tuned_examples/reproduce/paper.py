"""The paper's protocol: 150 iterations of 16 × 8 rollouts, two backbones, official games and goals, complete evaluation sets.

    trial-ray sweep table2 --scale paper --seeds 3

The command needs a cluster with 8 GPUs of 80 GB a run (docs/cluster.md). ALFWorld's games come from `ALFWORLD_DATA`, WebShop's
shop from `WEBSHOP_DATA`. The paper reports one seed; three are the default here.
"""

import sys
from pathlib import Path

from trial_ray.sweeps.study import EvaluationSplit, Scale

sys.path.insert(0, str(Path(__file__).parents[1]))
from paper_alfworld import paper_config

BACKBONES = {"Qwen2.5-3B": "Qwen/Qwen2.5-3B-Instruct", "Qwen3-1.7B": "Qwen/Qwen3-1.7B"}


def configure(environment, backbone):
    config = paper_config(BACKBONES[backbone])
    if environment == "alfworld":
        return config
    return (
        config.environment("trial/WebShop-v0", env_config={"split": "train", "max_turns": 15})
        .training(minibatch_rows=64, microbatch_rows=8, hindsight_coeff=0.005)
        .env_runners(max_prompt_tokens=4096)
        .evaluation(evaluation_split="test")
    )


scale = Scale(
    configure=configure,
    environments={
        "alfworld": (EvaluationSplit("valid_seen"), EvaluationSplit("valid_unseen")),
        "webshop": (EvaluationSplit("test"),),
    },
    backbones=tuple(BACKBONES),
    controlled_backbone="Qwen3-1.7B",
    iterations=150,
    seeds=3,
)

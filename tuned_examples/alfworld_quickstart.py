"""A small agent learns to act in ALFWorld on two CPU cores: `make train`, or

    trial-ray train tuned_examples/alfworld_quickstart.py

A model of 0.9 million parameters first clones an oracle that explores as a player would (cached after the first time), and stops at
about one game in three. TRIAL then trains it on generated games, fresh ones in every iteration. Its success is measured before and
after on the same 256 games, which neither stage has seen. docs/quickstart.md says what came out for three seeds, and why these
settings.
"""

from trial_ray.algorithms import TRIALConfig

GAMES = {"difficulty": "tiny", "max_turns": 20}

config = (
    TRIALConfig()
    .environment(
        "trial/ALFWorld-v0", env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **GAMES}
    )
    .policy(warm_start={"env_config": GAMES})
    .training(
        lr=3e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=256,
        microbatch_rows=64,
        # The invalid-reply penalty is about form, and a plain reply has none to miss; success alone is rewarded.
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        dual_clip=3.0,
        # No frozen reference: the tiny policy has nothing worth preserving, and may move.
        kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_coeff=0.05,
        hindsight_start_iteration=3,
    )
    .rollouts(max_prompt_tokens=512, max_response_tokens=16, prompt_style="plain", history_window=2)
    .engines(engine="vllm", num_cpus_per_engine=0.5)
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .panel(
        split="generated",
        env_config={"num_games": 256, "generator_seed": 2_000_003},
        num_tasks=256,
        # Greedy decoding repeats itself; a policy this small is measured as it was trained.
        temperature=1.0,
    )
    .debugging(seed=0)
)
stop = {"training_iteration": 20}

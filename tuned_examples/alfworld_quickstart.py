"""A small agent learns to act in ALFWorld on two CPU cores: `make train`, or

    trial-ray train tuned_examples/alfworld_quickstart.py

A model of 0.4 million parameters first clones a player who explores and, every fourth turn, does something beside the point (cached
after the first time). TRIAL then trains it on generated games, fresh ones in every iteration. Its success is measured before and
after on the same 256 games, which neither stage has seen. docs/quickstart.md says what came out, and why these
settings.
"""

from trial_ray.algorithms import TRIALConfig

GAMES = {"difficulty": "tiny", "max_turns": 12}

config = (
    TRIALConfig()
    .environment(
        "trial/ALFWorld-v0", env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **GAMES}
    )
    .policy(
        warm_start={
            "env_config": GAMES,
            "size": "mini",
            "history_window": 1,
            "suboptimal_probability": 0.25,
            "max_steps": 2000,
            # One check, at the end: the schedule is short enough to be run through.
            "check_every": 2000,
            "target_success": 0.1,
        }
    )
    .training(
        # Over environment steps (about 1,300 an iteration): at a constant 1e-3 one of three seeds fell back near the end.
        lr=[[0, 1e-3], [40_000, 1e-4]],
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=256,
        microbatch_rows=64,
        # A plain response has no form to miss; success alone is rewarded.
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        # No frozen reference: a policy of this size has nothing worth preserving, and may move.
        kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_coeff=0.01,
        hindsight_start_iteration=5,
    )
    .rollouts(max_prompt_tokens=512, max_response_tokens=16, prompt_style="plain", history_window=1)
    .engines(engine="vllm", num_cpus_per_engine=0.5)
    .env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .panel(
        split="generated",
        env_config={"num_games": 256, "generator_seed": 4_000_037},
        num_tasks=256,
        # Greedy decoding repeats itself; a policy this small is measured as it was trained.
        temperature=1.0,
    )
    .debugging(seed=0)
)
stop = {"training_iteration": 30}

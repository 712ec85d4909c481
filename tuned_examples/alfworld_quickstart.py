"""A small agent learns to act in ALFWorld on two CPU cores: `make train`, or

    trial-ray train tuned_examples/alfworld_quickstart.py

The initial policy, of 0.4 million parameters, comes with the package: it has cloned an expert that explores and takes a
suboptimal action with probability 0.25. TRIAL trains it on generated games, new ones in every iteration. Its success is
measured before and after on the same 256 held-out games. docs/quickstart.md has the result.
For your own environment, see tuned_examples/own_environment.py, in which a warm start makes the initial policy.
"""

from trial_ray import TRIALConfig
from trial_ray.models.folders import ALFWORLD_TINY

config = (
    TRIALConfig()
    .environment(
        "trial/ALFWorld-v0",
        env_config={
            "split": "generated",
            "num_games": 4096,
            "generator_seed": 0,
            "difficulty": "tiny",
            "max_turns": 12,
        },
    )
    .rl_module(model_path=ALFWORLD_TINY)
    .training(
        # The rate falls with the environment steps: at a constant 6e-4, single updates destroyed a policy after 40 iterations.
        lr=[[0, 6e-4], [58_000, 0.0]],
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=640,
        microbatch_rows=80,
        # Plain responses have no required form; the reward is success alone.
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        # No frozen reference: a policy of this size has no knowledge to preserve.
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        # These two values were chosen on other games (docs/results.md).
        hindsight_coeff=0.1,
        hindsight_start_iteration=5,
    )
    .env_runners(
        num_env_runners=1,
        num_cpus_per_env_runner=0.5,
        max_prompt_tokens=512,
        max_response_tokens=16,
        prompt_style="plain",
        history_window=1,
    )
    .engines(engine="vllm", num_cpus_per_engine=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    .evaluation(
        evaluation_split="generated",
        evaluation_env_config={"num_games": 256, "generator_seed": 6_000_011},
        evaluation_num_tasks=256,
        # Greedy decoding repeats itself, so the policy is evaluated at the temperature of training.
        evaluation_temperature=1.0,
    )
    .debugging(seed=0)
)
stop = {"training_iteration": 45}

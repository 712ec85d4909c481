"""A study on two CPU cores of the case that TRIAL assumes: in hindsight, the model judges actions better than it chooses them.

    trial-ray sweep study --scale study --dry-run
    trial-ray sweep study --scale study          # hours; the same command continues
    trial-ray evaluate MODEL --hindsight --env-adapter tuned_examples/reproduce/study.py    # MODEL: folder of the warm start

The warm start clones an expert that wastes a turn with probability 0.25. With a teacher context, the cloned response is the planned
action instead (docs/warmstart.md); `evaluate --hindsight` measures how well hindsight separates planned from wasted actions. The
expert uses only information that the prompt shows, so a model with the same prompt can judge. For each of the four hindsight
losses, λ is the best of 0.01, 0.1 and 1 on separate games; docs/results.md states the comparisons and what they can detect.
"""

import dataclasses

from trial_envs.alfworld.oracle import ForgetfulExplorer
from trial_ray import TRIALConfig
from trial_ray.adapters import alfworld
from trial_ray.sweeps.study import EvaluationSplit, Scale

ITERATIONS = 30
GAMES = {"difficulty": "tiny", "max_turns": 12}
ADAPTER = dataclasses.replace(
    alfworld.ADAPTER, warm_start=dataclasses.replace(alfworld.ADAPTER.warm_start, demonstrator=ForgetfulExplorer)
)


def configure(environment, backbone):
    return (
        TRIALConfig()
        .environment(
            "trial/ALFWorld-v0",
            env_config={"split": "generated", "num_games": 4096, "generator_seed": 0, **GAMES},
            adapter=ADAPTER,
        )
        .rl_module(
            warm_start={
                "env_config": GAMES,
                "size": "mini",
                "suboptimal_probability": 0.25,
                "hindsight_fraction": 0.5,
                "max_steps": 2000,
                "check_every": 2000,
                "target_success": 0.1,
                "threads": 1,
            }
        )
        .training(
            lr=3e-4,
            weight_decay=0.0,
            adam_betas=(0.9, 0.98),
            group_size=8,
            tasks_per_iteration=8,
            minibatch_rows=160,
            microbatch_rows=80,
            invalid_action_penalty=0.0,
            reward_scale=1.0,
            ref_kl_coeff=0.0,
            entropy_coeff=0.0,
            # As in the paper, the dense term begins after a sixth of the run.
            hindsight_start_iteration=ITERATIONS // 6,
        )
        .env_runners(
            num_env_runners=0,
            max_prompt_tokens=512,
            max_response_tokens=16,
            prompt_style="plain",
            history_window=1,
        )
        .engines(engine="transformers", num_cpus_per_engine=0.4)
        # The driver plays and learns, which saves a process a run.
        .learners(num_learners=0, num_cpus_per_learner=0.3)
        .resources(num_cpus_for_main_process=0.3)
        .evaluation(
            evaluation_split="generated",
            evaluation_env_config={"num_games": 256, "generator_seed": 4_000_037},
            evaluation_num_tasks=256,
            evaluation_temperature=1.0,
        )
        .debugging(seed=0)
    )


scale = Scale(
    configure=configure,
    environments={"alfworld": (EvaluationSplit("generated"),)},
    backbones=("mini",),
    controlled_backbone="mini",
    iterations=ITERATIONS,
    seeds=8,
    method_seeds=dict.fromkeys(("serl", "sdar", "rlsd", "grpo_opsd", "gigpo"), 3),
    method_settings={
        **{method: {"hindsight_coeff": 0.1} for method in ("uniform", "permuted", "trial")},
        **{
            method: {"rescaling_iterations": ITERATIONS // 3, "teacher_sync_iterations": 2}
            for method in ("serl", "stepopsd")
        },
        "rlsd": {"rescaling_iterations": 2 * ITERATIONS // 3},
    },
)

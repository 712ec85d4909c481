"""A small agent learns a data set of Reasoning Gym on two CPU cores: sums and differences of two digits.

    pip install reasoning-gym==0.1.25
    trial-ray train tuned_examples/reasoning_gym_chain_sum.py

A tiny model first clones the data set's own answers, of which two in five are replaced by any other number. TRIAL then trains it.
There are only 200 different questions, and held-out seeds repeat them: the model learns to prefer the answer to other numbers.
docs/environments.md has the result.
"""

from dataclasses import dataclass, replace

from trial_envs.core.projection import project_action
from trial_ray import TRIALConfig
from trial_ray.adapters.external import REASONING_GYM

NUMBERS = [str(number) for number in range(-9, 19)]


@dataclass(frozen=True)
class QuestionPrompt:
    """A prompt with the question alone; the whole response is the answer."""

    style = "plain"

    def render(self, context):
        return context.task

    def project(self, response):
        return project_action(response, self.style)


ADAPTER = replace(REASONING_GYM, templates={"plain": QuestionPrompt()})

config = (
    TRIALConfig()
    .environment(
        "trial/ReasoningGym-v0",
        env_config={
            "dataset": "chain_sum",
            "dataset_args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            "actions": NUMBERS,
        },
        adapter=ADAPTER,
    )
    .rl_module(
        warm_start={
            "size": "nano",
            "games": 1500,
            "episodes_per_game": 1,
            "suboptimal_probability": 0.4,
            "prompt_weight": 0.0,
            "max_steps": 1500,
            "check_every": 1500,
            "target_success": 0.1,
            "threads": 1,
        }
    )
    .training(
        lr=5e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=32,
        minibatch_rows=256,
        microbatch_rows=64,
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_start_iteration=4,
    )
    .env_runners(
        num_env_runners=2,
        num_cpus_per_env_runner=0.25,
        max_prompt_tokens=64,
        max_response_tokens=8,
        prompt_style="plain",
        history_window=0,
    )
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=1, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(evaluation_split="test", evaluation_num_tasks=256, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 60}

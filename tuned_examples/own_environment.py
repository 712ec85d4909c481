"""A custom environment, from its class to a trained policy: a guessing game in words, in minutes on two CPU cores.

    trial-ray train tuned_examples/own_environment.py

A tiny model first clones an expert that remembers which numbers the answers exclude, but takes another action with probability 0.3.
TRIAL then trains it. docs/environments.md explains this file step by step.
"""

import random
from dataclasses import dataclass

import gymnasium

from trial_envs.core.projection import project_action
from trial_ray import EnvironmentAdapter, TRIALConfig, WarmStartSpec

NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class GuessingGame(gymnasium.Env):
    """Find a number in four guesses; every answer says whether it is higher or lower."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hidden, self.guesses = int(self.np_random.integers(len(NUMBERS))), 0
        return "Which number is it?", self._info(won=False)

    def step(self, action):
        self.guesses += 1
        word = action.removeprefix("guess ")
        if word not in NUMBERS:
            answer, won = "That is no number from one to nine.", False
        else:
            difference = self.hidden - NUMBERS.index(word)
            answer = "That is the number!" if difference == 0 else f"It is {'higher' if difference > 0 else 'lower'}."
            won = difference == 0
        return answer, float(won), won, self.guesses == 4, self._info(won)

    def _info(self, won):
        offered = [f"guess {word}" for word in NUMBERS]
        return {"task": "Find the number.", "admissible_actions": offered, "won": won}


gymnasium.register(id="mine/Guessing-v0", entry_point=GuessingGame)


@dataclass(frozen=True)
class GuessingPrompt:
    """Prompt with the task, the conversation so far and the admissible guesses; the whole response is the action."""

    style = "plain"

    def render(self, context):
        said = [line for answer, guess in context.history for line in (answer, f"> {guess}")]
        return "\n".join([context.task, *said, context.observation, "Your guess", *context.admissible_actions])

    def project(self, response):
        return project_action(response, self.style)


class CarefulPlayer:
    """Guesses at random among the numbers that the answers do not exclude; uses only what the prompt shows."""

    def reset(self, task, observation, seed):
        self.random, self.left, self.last = random.Random(seed), list(range(len(NUMBERS))), None

    def act(self, observation, admissible):
        if self.last is not None and "higher" in observation:
            self.left = [number for number in self.left if number > self.last]
        elif self.last is not None and "lower" in observation:
            self.left = [number for number in self.left if number < self.last]
        return f"guess {NUMBERS[self.random.choice(self.left)]}"

    def carried_out(self, action):
        word = action.removeprefix("guess ")
        self.last = NUMBERS.index(word) if word in NUMBERS else None


ADAPTER = EnvironmentAdapter(
    env_id="mine/Guessing-v0",
    templates={"plain": GuessingPrompt()},
    warm_start=WarmStartSpec(demonstrator=CarefulPlayer),
    skills={"": "Guess the number in the middle of those that are left."},
)

config = (
    TRIALConfig()
    .environment("mine/Guessing-v0", adapter=ADAPTER)
    .rl_module(
        warm_start={
            "size": "mini",
            "games": 300,
            "episodes_per_game": 2,
            "suboptimal_probability": 0.3,
            "max_steps": 400,
            "check_every": 400,
            "target_success": 0.1,
        }
    )
    .training(
        lr=5e-4,
        weight_decay=0.0,
        adam_betas=(0.9, 0.98),
        group_size=8,
        tasks_per_iteration=16,
        minibatch_rows=256,
        microbatch_rows=64,
        invalid_action_penalty=0.0,
        reward_scale=1.0,
        ref_kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_start_iteration=4,
    )
    .env_runners(
        num_env_runners=1,
        num_cpus_per_env_runner=0.5,
        max_prompt_tokens=512,
        max_response_tokens=8,
        prompt_style="plain",
        history_window=3,
    )
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=0, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.5)
    # The environment has no task list, so its tasks are reset seeds; each split uses its own.
    .evaluation(evaluation_split="test", evaluation_num_tasks=256, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 20}

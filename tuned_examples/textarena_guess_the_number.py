"""A small agent learns a game of TextArena on two CPU cores: guess a number from 1 to 20 in four guesses.

    pip install 'trial-ray[textarena]'
    trial-ray train tuned_examples/textarena_guess_the_number.py

A tiny model first clones a player who halves the range that the answers leave, but makes any other guess in two turns of five.
TRIAL then trains it. Halving wins 15 games of 20. TextArena's own rules allow ten guesses, in which nobody loses.
"""

import re
from dataclasses import dataclass

from trial_envs.core.projection import project_action
from trial_ray import EnvironmentAdapter, TRIALConfig, WarmStartSpec
from trial_ray.environments.textarena import GamePlayer

GUESSES = [f"[{number}]" for number in range(1, 21)]


@dataclass(frozen=True)
class ShortPrompt:
    """The game's rules, its hints and the guesses so far; the whole response is the guess."""

    style = "plain"

    def render(self, context):
        said = [line for answer, guess in context.history for line in (self._hint(answer), f"> {guess}")]
        return "\n".join([context.task, *said, self._hint(context.observation), "guess"])

    def project(self, response):
        return project_action(response, self.style)

    @staticmethod
    def _hint(answer):
        found = re.search("higher|lower|invalid", answer)
        return "start" if found is None or "between" in answer else found[0]


ADAPTER = EnvironmentAdapter(
    env_id="trial/TextArena-v0",
    title="TextArena",
    templates={"plain": ShortPrompt()},
    warm_start=WarmStartSpec(demonstrator=GamePlayer),
    skills={"": "Guess the number in the middle of those that are left."},
)

config = (
    TRIALConfig()
    .environment(
        "trial/TextArena-v0",
        env_config={"game": "GuessTheNumber-v0", "game_args": {"max_turns": 4}, "actions": GUESSES},
        adapter=ADAPTER,
    )
    .rl_module(
        warm_start={
            "size": "nano",
            "history_window": 4,
            "games": 300,
            "episodes_per_game": 2,
            "suboptimal_probability": 0.4,
            "max_steps": 400,
            "check_every": 400,
            "target_success": 0.1,
            "threads": 1,
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
        kl_coeff=0.0,
        entropy_coeff=0.0,
        hindsight_start_iteration=4,
    )
    .env_runners(
        num_env_runners=2,
        num_cpus_per_env_runner=0.25,
        max_prompt_tokens=512,
        max_response_tokens=8,
        prompt_style="plain",
        history_window=4,
    )
    .engines(engine="transformers", num_cpus_per_engine=0.5)
    .learners(num_learners=1, num_cpus_per_learner=0.5)
    .resources(num_cpus_for_main_process=0.25)
    .evaluation(evaluation_split="test", evaluation_num_tasks=256, evaluation_temperature=1.0)
    .debugging(seed=0)
)
stop = {"training_iteration": 20}

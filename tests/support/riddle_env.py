"""A small game in words of a user's own whose tasks are seeds, its prompt, and a player of it."""

from dataclasses import dataclass
from typing import ClassVar

import gymnasium
from gymnasium.spaces import Text

from trial_envs.core.projection import project_action

WORDS = ("red", "green", "blue", "white")


class RiddleEnv(gymnasium.Env):
    """Guess a word of which the first letter is shown; ``told`` are the keys that ``info`` has."""

    ENV_ID = "mine/Riddle-v0"
    observation_space = action_space = Text(1000)

    def __init__(self, words=WORDS, told=("task", "admissible_actions", "won")):
        self.words, self.told = words, told

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = self.words[int(self.np_random.integers(len(self.words)))]
        return f"it begins with {self.word[0]}", self._info(won=False)

    def step(self, action):
        won = action == self.word
        return "right" if won else "wrong", float(won), won, False, self._info(won=won)

    def _info(self, won):
        info = {"task": "guess the word", "admissible_actions": list(self.words), "won": won}
        return {key: info[key] for key in self.told}


@dataclass(frozen=True, slots=True)
class Curt:
    """A template that addresses the player; the whole response is the action."""

    address: str = "captain"
    style: ClassVar[str] = "plain"

    def render(self, context):
        return f"{context.task}\n{context.observation}\n{self.address}, choose one: {', '.join(context.admissible_actions)}"

    def project(self, response):
        return project_action(response, self.style)


class Solver:
    """Guesses the word that begins with the letter."""

    def reset(self, task, observation, seed):
        self.letter = observation[-1]

    def act(self, observation, admissible):
        return next(word for word in admissible if word.startswith(self.letter))

    def carried_out(self, action):
        """Nothing to remember: another guess does not change the word."""

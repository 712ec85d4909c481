"""Reasoning Gym's questions: what the trainer knows of ``trial/ReasoningGym-v0``."""

from __future__ import annotations

from collections.abc import Sequence

from trial_ray.environments.adapter import EnvironmentAdapter, WarmStartSpec
from trial_ray.environments.templates import TaggedTemplate
from trial_ray.errors import ConfigError


class AnswerReader:
    """Gives the data set's own answer, which the question decides."""

    def __init__(self) -> None:
        self._solution: Sequence[str] = ()

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._solution = ()

    def show(self, solution: Sequence[str]) -> None:
        """Read the environment's ``walkthrough``."""
        self._solution = solution

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """The answer.

        Raises:
            ConfigError: the data set scores answers without having one of its own.
        """
        if not self._solution:
            raise ConfigError("The data set has no answer of its own to demonstrate; give its adapter a demonstrator.")
        return self._solution[0]

    def carried_out(self, action: str) -> None:
        """Nothing is remembered: the answer ends the episode."""


ADAPTER = EnvironmentAdapter(
    env_id="trial/ReasoningGym-v0",
    title="Reasoning Gym",
    templates={
        "tagged": TaggedTemplate("You answer a question; your action is the answer alone.", keep_case=True),
    },
    warm_start=WarmStartSpec(demonstrator=AnswerReader),
)

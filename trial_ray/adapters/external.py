"""Adapters of other libraries' environments and of users' programs.

The libraries are TextWorld, OpenEnv, TextArena, Reasoning Gym, GEM and ScienceWorld. A user's agent program, which sends chat
requests to the policy, is run by :class:`trial_envs.program.ProgramEnv`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trial_envs.core.projection import Projection
from trial_envs.imports.number_search import NumberSearch
from trial_envs.program import answer_action
from trial_ray.adapters.adapter import (
    ACQUISITION,
    NAVIGATION,
    Demonstrator,
    EnvironmentAdapter,
    RandomAgent,
    ReportLabels,
    WarmStartSpec,
)
from trial_ray.adapters.templates import PromptContext, PromptStyle, TaggedTemplate
from trial_ray.errors import ConfigError

_REASONING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
ROLE = "You are an agent who plays a text game by yourself, one move at a time."


class GameAgent:
    """Expert that finds a number by bisection if the game requests a number, and otherwise draws random admissible actions.

    Args:
        form: format of a number in the game's actions, with ``{}`` in place of the number.
    """

    def __init__(self, form: str = "[{}]") -> None:
        self._search = NumberSearch(form)
        self._agent: Demonstrator = self._search

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._agent = self._search if self._search.plays(task) else RandomAgent()
        self._agent.reset(task, observation, seed)

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Choose an action.

        Raises:
            ConfigError: the game does not request a number, and the environment lists no admissible actions.
        """
        return self._agent.act(observation, admissible)

    def carried_out(self, action: str) -> None:
        """Receive the action that was carried out."""
        self._agent.carried_out(action)


def _gem_agent() -> GameAgent:
    return GameAgent("\\boxed{{{}}}")


class AnswerReader:
    """Expert that answers a question with the data set's own answer."""

    _solution: Sequence[str] = ()

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode."""
        self._solution = ()

    def show(self, solution: Sequence[str]) -> None:
        """Receive the environment's solution."""
        self._solution = solution

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return the data set's answer.

        Raises:
            ConfigError: the data set can score answers, but does not contain the right answer.
        """
        if not self._solution:
            raise ConfigError("The data set has no answer to demonstrate; set the demonstrator of its adapter.")
        return self._solution[0]

    def carried_out(self, action: str) -> None:
        """Do nothing: the answer ends the episode."""


TEXTWORLD = EnvironmentAdapter(
    env_id="trial/TextWorld-v0",
    templates={
        "tagged": TaggedTemplate(
            "You are an agent who explores rooms described in text and looks for one object.", keep_case=True
        )
    },
    labels=ReportLabels(action_patterns=((r"take ", ACQUISITION), (r"go ", NAVIGATION))),
)
OPENENV = EnvironmentAdapter(
    env_id="trial/OpenEnv-v0",
    own_process=True,  # A slow OpenEnv server must not block other rollouts.
)
TEXTARENA = EnvironmentAdapter(
    env_id="trial/TextArena-v0",
    title="TextArena",
    templates={"tagged": TaggedTemplate(ROLE, keep_case=True)},
    warm_start=WarmStartSpec(demonstrator=GameAgent),
)
REASONING_GYM = EnvironmentAdapter(
    env_id="trial/ReasoningGym-v0",
    title="Reasoning Gym",
    templates={"tagged": TaggedTemplate("You answer a question; your action is the answer alone.", keep_case=True)},
    warm_start=WarmStartSpec(demonstrator=AnswerReader),
)
GEM = EnvironmentAdapter(
    env_id="trial/GEM-v0",
    title="GEM",
    templates={"tagged": TaggedTemplate(ROLE, keep_case=True)},
    warm_start=WarmStartSpec(demonstrator=_gem_agent),
)
SCIENCEWORLD = EnvironmentAdapter(
    env_id="trial/ScienceWorld-v0",
    title="ScienceWorld",
    templates={
        "tagged": TaggedTemplate("You are an agent who carries out science experiments in a house described in text.")
    },
    own_process=True,
)


@dataclass(frozen=True)
class ProgramTemplate:
    """Template for an agent program's environment: prompts have the messages of the program's chat requests, unchanged.

    Attributes:
        style: ``"tools"`` if the chat requests may offer tools, else ``"conversation"``.
    """

    style: PromptStyle = "conversation"

    def system(self, task: str) -> str:
        """Return the task of the environment, which is the text of the first message of the program's first chat request."""
        return task

    def render(self, context: PromptContext) -> str:
        """Return the observation, which contains the texts of the new messages of the program's chat request."""
        return context.observation

    def project(self, response: str) -> Projection:
        """Return the answer to the program's chat request, with reasoning split off; a response with only reasoning is invalid."""
        match = _REASONING.match(response)
        text = response[match.end() :].strip() if match else response
        return Projection(answer_action(text, reasoning=match[1].strip() if match else ""), bool(text.strip()))


def program_adapter(env_id: str, **fields: Any) -> EnvironmentAdapter:
    """Create the adapter of a :class:`~trial_envs.program.ProgramEnv`.

    The run needs ``prompt_style="conversation"``, or ``"tools"`` if the program's chat requests offer tools.

    Args:
        env_id: id of the environment in Gymnasium's registry.
        fields: further fields of the adapter. By default, ``own_process`` is ``True``, since a program may block, and
            ``defaults`` sets ``reward`` to ``"return"``, since the program determines the reward.
    """
    defaults: dict[str, Any] = {"own_process": True, "defaults": {"reward": "return"}}
    defaults["templates"] = {"conversation": ProgramTemplate(), "tools": ProgramTemplate("tools")}
    return EnvironmentAdapter(env_id, **{**defaults, **fields})

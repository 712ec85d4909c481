"""Programs as environments: a user's coroutine calls the policy as a chat model; see :class:`trial_envs.program.ProgramEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from trial_envs.core.projection import Projection
from trial_envs.program import program_tools
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.templates import PromptContext, PromptStyle, TaggedTemplate, ToolTemplate


@dataclass(frozen=True, slots=True)
class ProgramTemplate:
    """The messages that the program wrote; the whole response is the action, and its answer."""

    style: ClassVar[PromptStyle] = "conversation"

    def system(self, task: str) -> str:
        """The program's system message."""
        return task

    def render(self, context: PromptContext) -> str:
        """The program's next message."""
        return context.observation

    def project(self, response: str) -> Projection:
        """The whole response; one without text is invalid."""
        return Projection(response, bool(response.strip()))


@dataclass(frozen=True, slots=True)
class ProgramToolTemplate(ToolTemplate):
    """The messages that the program wrote, of which those behind a call are the tool's."""

    tagged: TaggedTemplate = field(default_factory=partial(TaggedTemplate, ""))

    def system(self, task: str) -> str:
        """The program's system message."""
        return task

    def render(self, context: PromptContext) -> str:
        """The program's next message, after the last turns if the conversation starts again."""
        past = [self.tagged.past(context)] if context.history else []
        return "\n\n".join([*past, context.observation])


def program_adapter(env_id: str, tools: Sequence[Callable[..., Any]] = (), **fields: Any) -> EnvironmentAdapter:
    """The adapter of a :class:`~trial_envs.program.ProgramEnv`, for ``prompt_style="conversation"``, or ``"tools"`` with tools.

    Args:
        env_id: id under which the environment is registered with Gymnasium.
        tools: functions that the program offers the policy, with type hints and docstrings.
        fields: further fields of the adapter. ``own_process`` is ``True`` by default: a program may block.
    """
    used = {"tools": program_tools(tools), "templates": {"tools": ProgramToolTemplate()}} if tools else {}
    return EnvironmentAdapter(
        env_id, **{"templates": {"conversation": ProgramTemplate()}, "own_process": True, **used, **fields}
    )

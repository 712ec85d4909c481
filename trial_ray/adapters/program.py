"""Programs as environments: a user's coroutine calls the policy as a chat model; see :class:`trial_envs.program.ProgramEnv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from trial_envs.core.projection import Projection
from trial_envs.program import program_tools
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.templates import PromptContext, PromptStyle, TaggedTemplate, ToolTemplate


@dataclass(frozen=True, slots=True)
class ProgramTemplate:
    """Messages written by the program; the whole response is the action, which answers the program's call."""

    style: ClassVar[PromptStyle] = "conversation"

    def system(self, task: str) -> str:
        """Return the program's system message."""
        return task

    def render(self, context: PromptContext) -> str:
        """Return the program's next message."""
        return context.observation

    def project(self, response: str) -> Projection:
        """Return the whole response; a response without text is invalid."""
        return Projection(response, bool(response.strip()))


@dataclass(frozen=True, slots=True)
class ProgramToolTemplate(ToolTemplate):
    """Messages written by the program; a message after a tool call is the tool's result."""

    tagged: TaggedTemplate = field(default_factory=partial(TaggedTemplate, ""))

    def system(self, task: str) -> str:
        """Return the program's system message."""
        return task

    def render(self, context: PromptContext) -> str:
        """Return the program's next message, preceded by the last turns if the conversation restarts."""
        past = [self.tagged.past(context)] if context.history else []
        return "\n\n".join([*past, context.observation])


def program_adapter(env_id: str, tools: Sequence[Callable[..., Any]] = (), **fields: Any) -> EnvironmentAdapter:
    """Create the adapter of a :class:`~trial_envs.program.ProgramEnv`.

    It is for ``prompt_style="conversation"``, or ``"tools"`` with tools.

    Args:
        env_id: id of the environment in Gymnasium's registry.
        tools: functions that the program offers the policy, with type hints and docstrings.
        fields: further fields of the adapter. ``own_process`` is ``True`` by default, since a program may block, and ``reward``
            is ``"return"``: what the program returns.
    """
    defaults: dict[str, Any] = {"own_process": True, "defaults": {"reward": "return"}}
    if tools:
        defaults |= {"tools": program_tools(tools), "templates": {"tools": ProgramToolTemplate()}}
    else:
        defaults["templates"] = {"conversation": ProgramTemplate()}
    return EnvironmentAdapter(env_id, **{**defaults, **fields})

"""Programs as environments: a user's coroutine calls the policy as a chat model; see :class:`trial_envs.program.ProgramEnv`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from trial_envs.core.projection import Projection
from trial_ray.environments.adapter import EnvironmentAdapter
from trial_ray.environments.templates import PromptContext, PromptStyle


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


def program_adapter(env_id: str, **fields: Any) -> EnvironmentAdapter:
    """The adapter of a :class:`~trial_envs.program.ProgramEnv`, for ``prompt_style="conversation"``.

    Args:
        env_id: id under which the environment is registered with Gymnasium.
        fields: further fields of the adapter. ``own_process`` is ``True`` by default: a program may block.
    """
    return EnvironmentAdapter(
        env_id, **{"templates": {"conversation": ProgramTemplate()}, "own_process": True, **fields}
    )

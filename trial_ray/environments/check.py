"""Checks an environment against the contract before any actor starts."""

from __future__ import annotations

import logging

from trial_envs.errors import TrialEnvError
from trial_ray.environments.guarded import GuardedEnv, StepResult
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.environments.templates import PromptContext, require_task
from trial_ray.errors import ConfigError, EnvironmentFaultError, TrialRayError

logger = logging.getLogger(__name__)

SUCCESS_KEYS = ("won",)
"""Key of ``info`` that ``reward="success"`` needs without an adapter's ``success``."""


def required_keys(entry: EnvironmentEntry, reward: str) -> tuple[str, ...]:
    """Keys that ``info`` must hold at the end of an episode for this reward."""
    return SUCCESS_KEYS if reward == "success" and entry.adapter.success is None else ()


def check_environment(
    entry: EnvironmentEntry, tasks: list[str], *, style: str, reward: str, privileged_view: str | None
) -> StepResult:
    """Play one turn of the first task and look at what the environment tells.

    Args:
        entry: the environment.
        tasks: its tasks.
        style: of the prompts, as in ``.env_runners(prompt_style=...)``.
        reward: what R_i is, as in ``.training(reward=...)``.
        privileged_view: as in ``.training(privileged_view=...)``.

    Returns:
        What the environment shows at the beginning of the first task.

    Raises:
        ConfigError: ``info`` lacks what the reward needs, the environment offers no solution to a view that shows it, or the
            template drops the task; names the environment and what is missing.
        EnvironmentFaultError: the environment raised, or breaks the contract of text environments.
    """
    env = GuardedEnv(entry)
    try:
        start = env.reset(tasks[0], 0)
        solution = env.walkthrough()
        env.step(start.admissible_actions[0] if start.admissible_actions else "look")
    except EnvironmentFaultError as error:
        if isinstance(error.__cause__, (TrialEnvError, TrialRayError)):  # says by itself what to do
            raise error.__cause__ from None
        raise
    finally:
        env.close()
    if missing := [key for key in required_keys(entry, reward) if key not in env.told]:
        raise ConfigError(
            f"The info of {entry.env_id} lacks {', '.join(map(repr, missing))}, which reward={reward!r} needs (found "
            f"{', '.join(sorted(env.told)) or 'no keys'}). Add it to info, say when an episode is won with "
            "EnvironmentAdapter(success=...), or choose reward='score' or 'return'."
        )
    if privileged_view == "solution" and not solution:
        raise ConfigError(
            f"privileged_view='solution' needs an environment that knows one, but {entry.env_id} has no `walkthrough`. Add "
            "it to the environment, or choose another privileged_view."
        )
    context = PromptContext(start.task, start.observation, start.admissible_actions, (), 2)
    require_task(entry.adapter.template(style), context, entry.env_id)
    if entry.adapter.own_template(style) is None:
        logger.warning(
            "%s has no prompt template of its own for %s prompts: the generic one is used. Give it one with "
            "EnvironmentAdapter(templates={%r: ...}).",
            entry.env_id,
            style,
            style,
        )
    return start

"""The check of an environment before a run."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from trial_envs.errors import TrialEnvError
from trial_envs.tool_env import text_command
from trial_ray.adapters.guarded import ContractError, GuardedEnv, StepResult, required_keys
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.adapters.templates import PromptContext, require_task
from trial_ray.errors import ConfigError, EnvironmentFaultError, TrialRayError

logger = logging.getLogger(__name__)


def check_environment(
    entry: EnvironmentEntry,
    tasks: list[str],
    *,
    style: str,
    reward: Any,
    teacher_context: str | None,
    episodes_at_once: int = 1,
) -> StepResult:
    """Play one turn of the first task and check the environment's answers; log a warning if it does not repeat its start.

    Args:
        entry: the environment.
        tasks: its tasks.
        style: style of the prompts, as in ``.env_runners(prompt_style=...)``.
        reward: definition of the reward R_i, as in ``.training(reward=...)``.
        teacher_context: as in ``.training(teacher_context=...)``.
        episodes_at_once: maximum number of episodes that the run plays at once, on all env runners.

    Returns:
        Result of ``reset`` for the first task.

    Raises:
        ConfigError: the environment raised or breaks the contract of text environments, ``info`` lacks a key that the reward needs,
            fewer instances can play than the run needs, there is no solution for the teacher context ``"solution"``, or the
            template drops the task; names the environment.
    """
    env = GuardedEnv(entry)
    try:
        start = env.reset(tasks[0], 0)
        solution, instances = env.walkthrough(), env.max_instances()
        if _step(env, entry, style, start):
            _require_keys(entry, reward, env.info_keys)
        _warn_of_other_start(entry, tasks[0], start, env.reset(tasks[0], 0))
    except EnvironmentFaultError as error:
        if isinstance(error.__cause__, (TrialEnvError, TrialRayError)):  # The message of the error states the remedy.
            raise error.__cause__ from None
        raise _config_error(error) from error
    finally:
        env.close()
    if instances is not None and episodes_at_once > instances:
        raise ConfigError(
            f"The run plays up to {episodes_at_once} episodes at once (max_episodes_in_flight on each env runner), but "
            f"{entry.env_id} has {instances} sessions on its server. Lower .env_runners(max_episodes_in_flight=...), or raise the "
            "server's limit (--max-sessions of trial_envs.openenv)."
        )
    if teacher_context == "solution" and not solution:
        raise ConfigError(
            f"teacher_context='solution' needs an environment with a solution, but {entry.env_id} has no `walkthrough`. Add it to "
            "the environment, or choose another teacher_context."
        )
    context = PromptContext(start.task, start.observation, start.admissible_actions, (), 2)
    require_task(entry.adapter.template(style), context, entry.env_id)
    if entry.adapter.own_template(style) is None:
        logger.warning(
            "%s has no prompt template for %s prompts: the generic template is used. Set one with "
            "EnvironmentAdapter(templates={%r: ...}).",
            entry.env_id,
            style,
            style,
        )
    return start


def _step(env: GuardedEnv, entry: EnvironmentEntry, style: str, start: StepResult) -> bool:
    """Carry out an action, and return whether an action is known that the environment accepts."""
    say = text_command(entry.adapter.tools) if style == "tools" else None
    if say is not None:
        env.step(say("look"))
    elif start.admissible_actions:
        env.step(start.admissible_actions[0])
    elif style != "tools":
        env.step("look")
    else:
        return False
    return True


def _require_keys(entry: EnvironmentEntry, reward: Any, info_keys: set[str]) -> None:
    """Require the keys of ``info`` that the reward needs."""
    if missing := [key for key in required_keys(entry, reward) if key not in info_keys]:
        raise ConfigError(
            f"The info of {entry.env_id} lacks {', '.join(map(repr, missing))}, which reward={reward!r} needs (found "
            f"{', '.join(sorted(info_keys)) or 'no keys'}). Add it to info, define when an episode is won with "
            "EnvironmentAdapter(success=...), or choose reward='score' or 'return'."
        )


def _config_error(error: EnvironmentFaultError) -> ConfigError:
    """Return the error for the user, with a note on the line of the environment that raised."""
    config_error, cause = ConfigError(str(error)), error.__cause__
    if cause and not isinstance(cause, ContractError):
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        config_error.add_note(f"in {frame.filename}, line {frame.lineno}")
    return config_error


def _warn_of_other_start(entry: EnvironmentEntry, task_id: str, first: StepResult, second: StepResult) -> None:
    shown = ("task", "observation", "admissible_actions")
    if changed := [name for name in shown if getattr(first, name) != getattr(second, name)]:
        logger.warning(
            "%s, task %r: two resets with the same seed differ in %s. The rollouts of a group are attempts at one task; "
            "if their starts differ, advantages also compare the difficulty of these starts. Let reset depend on its seed and "
            "options only.",
            entry.env_id,
            task_id,
            " and ".join(changed),
        )

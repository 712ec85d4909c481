"""What a run needs of an environment, held against the environment itself before any actor starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trial_envs.errors import TrialEnvError
from trial_ray.environments.guarded import StepResult, start_episode
from trial_ray.environments.registry import EnvironmentEntry
from trial_ray.environments.templates import PromptContext, require_task
from trial_ray.errors import ConfigError, EnvironmentFaultError, TrialRayError

logger = logging.getLogger(__name__)

SUCCESS_KEYS = ("won",)
"""What ``info`` must hold where ``reward="success"`` and the adapter does not say when an episode is won."""


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
    """
    adapter = entry.adapter
    env = _told(entry, "creation", entry.make)
    try:
        observation, info = _told(entry, "reset", lambda: start_episode(env, tasks[0], 0))
        observation, info = str(observation), _require_dict(entry, "reset", info)
        solution = getattr(env.unwrapped, "walkthrough", ())
        actions = list(info.get("admissible_actions", ()))
        told = {**info, **_info_of_a_turn(entry, env, str(actions[0]) if actions else "look")}
    finally:
        env.close()
    _require_keys(entry, reward, told)
    if privileged_view == "solution" and not solution:
        raise ConfigError(
            f"privileged_view='solution' needs an environment that knows one, but {entry.env_id} has no `walkthrough`. Add "
            "it to the environment, or choose another privileged_view."
        )
    task = str(info.get("task", adapter.task))
    require_task(adapter.template(style), PromptContext(task, observation, actions, (), 2), entry.env_id)
    if adapter.own_template(style) is None:
        logger.warning(
            "%s has no prompt template of its own for %s prompts: the generic one is used. Give it one with "
            "EnvironmentAdapter(templates={%r: ...}).",
            entry.env_id,
            style,
            style,
        )
    return StepResult(observation, task, "", actions, won=False, score=0.0)


def _told(entry: EnvironmentEntry, stage: str, call: Callable[[], Any]) -> Any:
    """What ``call`` returns; an error of the environment's own code is told with its id and the call."""
    try:
        return call()
    except (TrialEnvError, TrialRayError):
        raise
    except Exception as error:
        raise EnvironmentFaultError(f"{entry.env_id}, {stage}: {type(error).__name__}: {error}") from error


def _require_keys(entry: EnvironmentEntry, reward: str, told: Mapping[str, Any]) -> None:
    missing = [key for key in required_keys(entry, reward) if key not in told]
    if missing:
        raise ConfigError(
            f"The info of {entry.env_id} lacks {', '.join(map(repr, missing))}, which reward={reward!r} needs (found "
            f"{', '.join(sorted(map(str, told))) or 'no keys'}). Add it to info, say when an episode is won with "
            "EnvironmentAdapter(success=...), or choose reward='score' or 'return'."
        )


def _info_of_a_turn(entry: EnvironmentEntry, env: Any, action: str) -> Mapping[str, Any]:
    answer = _told(entry, f"step({action!r})", lambda: env.step(action))
    if not isinstance(answer, tuple | list) or len(answer) != 5:
        raise ConfigError(
            f"step() of {entry.env_id} gave {answer!r:.200}, expected (observation, reward, terminated, truncated, info)."
        )
    return _require_dict(entry, "step", answer[4])


def _require_dict(entry: EnvironmentEntry, method: str, info: Any) -> Mapping[str, Any]:
    if not isinstance(info, dict):
        raise ConfigError(f"{method}() of {entry.env_id} gave info {info!r:.200}, expected a dict.")
    return info

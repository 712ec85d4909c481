"""A text environment as a conversation: prompt, messages and metrics, used by :mod:`trial_envs.exports`.

A user message contains an observation and the admissible actions. A response contains its action between ``<action>``
and ``</action>``; :func:`trial_envs.core.projection.project_action` reads it.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium

import trial_envs
from trial_envs.core import TextEnv
from trial_envs.wrappers import ActionProjection

SYSTEM_PROMPT = (
    "You act in an environment that is described in text. Every message shows the result of your last action and the actions "
    "that you can take. Begin every response with your reasoning, enclosed in <think> and </think>. Then give exactly one "
    "action, enclosed in <action> and </action>."
)
"""System prompt with the response format. The task is in the first user message."""


def make_text_env(env_id: str, **settings: Any) -> gymnasium.Env[str, str]:
    """Make a text environment of this package.

    Args:
        env_id: a registered id, such as ``trial/ALFWorld-v0``.
        settings: keyword arguments of ``gymnasium.make``.

    Raises:
        TypeError: the environment is not a :class:`trial_envs.core.TextEnv`.
    """
    trial_envs.register()
    env = gymnasium.make(env_id, disable_env_checker=True, **settings)
    if not isinstance(env.unwrapped, TextEnv):
        class_name = type(env.unwrapped).__name__
        env.close()
        raise TypeError(f"{env_id} is a {class_name}, expected a TextEnv of trial_envs.")
    return env


def make_chat_env(env_id: str, **settings: Any) -> gymnasium.Env[str, str]:
    """Make a text environment whose ``step`` takes a whole response; see :func:`make_text_env` for arguments and errors."""
    env = make_text_env(env_id, **settings)
    return ActionProjection(env, keep_case=cast(TextEnv, env.unwrapped).keeps_case)


def with_task(observation: str, info: dict[str, Any]) -> str:
    """Return the first observation of an episode, preceded by the task if the observation does not contain it."""
    task = info["task"]
    return observation if task in observation else f"{task}\n\n{observation}"


def user_message(observation: str, info: dict[str, Any]) -> str:
    """Return a user message: the observation, followed by the admissible actions if the environment lists any."""
    actions = info["admissible_actions"]
    return f"{observation}\n\nActions: {', '.join(actions)}" if actions else observation


def episode_metrics(total_reward: float, turns: int, invalid: int, info: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an episode by name, for another library to log.

    Args:
        total_reward: sum of the rewards.
        turns: number of actions taken.
        invalid: number of responses that are not in the required format.
        info: ``info`` after the last action.
    """
    return {
        "total_reward": total_reward,
        "won": float(info["won"]),
        "score": float(info["score"]),
        "turns": float(turns),
        "invalid_responses": float(invalid),
    }

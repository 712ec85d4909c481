"""Check of the setting ``reward``: a name, or one or several functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle

from trial_ray.adapters.guarded import REWARD_NAME
from trial_ray.config.training import RECORDED_FUNCTION, REWARDS, TOTAL, reward_name
from trial_ray.errors import ConfigError


def check_reward(reward: Any, weights: Mapping[str, float]) -> None:
    """Reject a reward that is neither a known name nor functions that can be sent to actors, and weights of unknown functions.

    Args:
        reward: the setting ``reward``.
        weights: the setting ``reward_weights``.

    Raises:
        ConfigError: the reward or a weight is invalid; the message contains the value.
    """
    if isinstance(reward, str) and (reward in REWARDS or reward.startswith(RECORDED_FUNCTION)):
        if weights and reward in REWARDS:
            raise ConfigError(f"reward_weights weighs the parts of a reward function, but reward is {reward!r}.")
        return
    functions = reward if isinstance(reward, list) else [reward]
    if not functions or not all(map(callable, functions)):
        raise ConfigError(
            f"reward is {reward!r}, expected one of {', '.join(map(repr, REWARDS))}, or a function that is called with "
            "each episode and returns a number, or a list of such functions."
        )
    for function in functions:
        _check_function(function)
    if isinstance(reward, list):
        names = [reward_name(function) for function in functions]
        if len({*names, TOTAL}) <= len(names):
            raise ConfigError(
                f"The reward functions are called {', '.join(names)}, and their rewards are logged by these names; expected "
                f"different names other than {TOTAL!r}, the name of their sum."
            )
        if unknown := sorted(weights.keys() - {*names}):
            raise ConfigError(f"reward_weights names {', '.join(unknown)}; expected names of {', '.join(names)}.")


def _check_function(function: Any) -> None:
    """Reject a function that cannot be called with an episode, logged by its name or sent to actors.

    Raises:
        ConfigError: the function is rejected; the message contains its name.
    """
    name = reward_name(function)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"The reward function {name} cannot be called with one argument, the episode: {error}."
        ) from error
    except ValueError:  # Some callables, such as functions in C, have no signature.
        pass
    if not REWARD_NAME.fullmatch(name):
        raise ConfigError(
            f"The reward function is called {name!r:.100}, and its reward is logged by that name; expected at most 64 ASCII "
            "letters, digits and '_'."
        )
    try:
        cloudpickle.dumps(function)
    except Exception as error:  # Any object that the function uses may raise its own error.
        raise ConfigError(
            f"The reward function {name} cannot be sent to env runners ({type(error).__name__}: {error}). "
            "Create clients, locks and open files inside the function."
        ) from error

"""An environment as a rollout meets it: anyone's code, whose errors and broken promises must end that rollout alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import gymnasium
import numpy as np

from trial_ray.errors import EnvironmentFaultError

logger = logging.getLogger(__name__)

KEYS = ("task", "family", "admissible_actions", "won", "score")
"""What a rollout reads of ``info``; the whole contract is that of :mod:`trial_envs.core.text_env`."""
ROUNDING = 1e-6
"""How far a score that was added up of parts may lie outside of [0, 1]."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What an environment answered, to ``reset`` or to an action; types are those of the contract.

    Attributes:
        observation: what it shows.
        task, family, admissible_actions, won, score: as in its ``info``.
        reward: for the action; 0 after ``reset``.
        terminated: the task itself ended.
        truncated: a limit of the environment cut the episode.
    """

    observation: str
    task: str
    family: str
    admissible_actions: Sequence[str]
    won: bool
    score: float
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class GuardedEnv:
    """One instance of a text environment, made at its first reset.

    Every call either gives what the contract promises or raises an :class:`~trial_ray.errors.EnvironmentFaultError` that
    names environment, task, turn and cause. Nothing else is caught.

    Args:
        creator: makes the instance.
        env_id: what messages call it.

    Attributes:
        faulty: a call went wrong, so that the instance must not be used again.
    """

    def __init__(self, creator: Callable[[], gymnasium.Env], env_id: str) -> None:
        self.faulty = False
        self._creator = creator
        self._env_id = env_id
        self._env: gymnasium.Env | None = None
        self._task_id = ""
        self._turn = 0

    def reset(self, task_id: str, seed: int) -> Situation:
        """Start an episode of a task.

        Raises:
            EnvironmentFaultError: the environment could not be made, ``reset`` raised, or its answer breaks the contract.
        """
        self._task_id, self._turn = task_id, 0
        if self._env is None:
            self._env = self._call("creation", self._creator)
        env = self._env
        return self._call("reset", lambda: env.reset(seed=seed, options={"task": task_id}), _read_reset)

    def step(self, action: str) -> Situation:
        """Carry out an action of the running episode.

        Raises:
            EnvironmentFaultError: ``step`` raised, or its answer breaks the contract.
        """
        self._turn += 1
        return self._call(f"turn {self._turn}", lambda: self._env.step(action), _read_step)

    def walkthrough(self) -> tuple[str, ...]:
        """The environment's own solution of the running task; empty where it knows none.

        Raises:
            EnvironmentFaultError: reading it raised, or it is no list of actions.
        """
        return self._call("walkthrough", lambda: getattr(self._env.unwrapped, "walkthrough", ()), _read_walkthrough)

    def close(self) -> None:
        """Close the instance, if one was made; an error is logged, since nothing is left to be saved."""
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                logger.warning("%s could not be closed", self._env_id, exc_info=True)

    def _call(self, place: str, call: Callable[[], Any], read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        try:
            answer = call()
        except Exception as error:
            raise self._fault(place, _first_line(error), error) from error
        try:
            return read(answer)
        except _ContractError as error:
            raise self._fault(place, str(error), error) from error

    def _fault(self, place: str, cause: str, error: Exception) -> EnvironmentFaultError:
        self.faulty = True
        told = f"{self._env_id}, task {self._task_id!r}, {place}: {cause}"
        # The message that travels to the driver has one line; whoever mends the environment needs the traceback.
        logger.warning(told, exc_info=error)
        return EnvironmentFaultError(told)


class _ContractError(TypeError):
    """An answer is not what the contract of text environments promises."""


def _read_reset(answer: Any) -> Situation:
    observation, info = _parts("reset", answer, ("observation", "info"))
    return _situation(observation, info)


def _read_step(answer: Any) -> Situation:
    names = ("observation", "reward", "terminated", "truncated", "info")
    observation, reward, terminated, truncated, info = _parts("step", answer, names)
    return _situation(
        observation,
        info,
        reward=float(_require("reward", reward, "a finite number", isinstance(reward, Real) and math.isfinite(reward))),
        terminated=_truth("terminated", terminated),
        truncated=_truth("truncated", truncated),
    )


def _read_walkthrough(answer: Any) -> tuple[str, ...]:
    return tuple(_texts("walkthrough", answer))


def _situation(observation: Any, info: Any, **more: Any) -> Situation:
    _require("observation", observation, "a str", isinstance(observation, str))
    _require("info", info, "a dict", isinstance(info, dict))
    if missing := [key for key in KEYS if key not in info]:
        raise _ContractError(f"info without {', '.join(map(repr, missing))}; expected the keys {', '.join(KEYS)}")
    task, family, actions, won, score = (info[key] for key in KEYS)
    in_range = isinstance(score, Real) and -ROUNDING <= score <= 1 + ROUNDING
    return Situation(
        observation=observation,
        task=_require("info['task']", task, "a str", isinstance(task, str)),
        family=_require("info['family']", family, "a str", isinstance(family, str)),
        admissible_actions=_texts("info['admissible_actions']", actions),
        won=_truth("info['won']", won),
        score=float(_require("info['score']", score, "a number in [0, 1]", in_range)),
        **more,
    )


def _parts(method: str, answer: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple | list) or len(answer) != len(names):
        raise _ContractError(f"{method}() gave {_shown(answer)}; expected {len(names)} values: {', '.join(names)}")
    return tuple(answer)


def _truth(name: str, value: Any) -> bool:
    return bool(_require(name, value, "a bool", isinstance(value, bool | np.bool_)))


def _texts(name: str, value: Any) -> Sequence[str]:
    texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    return _require(name, value, "a list of str", texts)


def _require(name: str, value: Any, expected: str, kept: bool) -> Any:
    if not kept:
        raise _ContractError(f"{name} {_shown(value)}; expected {expected}")
    return value


def _shown(value: Any) -> str:
    """On one line, since arrays print on several."""
    return f"{' '.join(repr(value).split()):.200} ({type(value).__name__})"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__

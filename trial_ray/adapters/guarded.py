"""Isolates and validates environments, so that an error of an environment fails only the rollout of that environment."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import gymnasium
import numpy as np

from trial_envs.program import ChatCall
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.adapters.registry import EnvironmentEntry
from trial_ray.errors import EnvironmentFaultError
from trial_ray.objectives import ROUNDING, equal_up_to_rounding

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MAX_CHARACTERS = 2_000_000
"""Maximum total length of the texts of a step; a longer prompt would block the env runner's other episodes for seconds."""
MAX_REWARDS = 32
"""Maximum number of named rewards of a turn, or of parts that a reward function returns; each name becomes a metric."""
REWARD_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Validated result of ``reset`` or ``step``.

    :mod:`trial_envs.core.text_env` defines the contract of text environments; the environment's adapter provides values that
    are missing in ``info``.

    Attributes:
        observation: the environment's text.
        task: ``info["task"]``, else the adapter's ``task``.
        family: ``info["family"]``, else empty.
        admissible_actions: ``info["admissible_actions"]``, else empty.
        won: the adapter's ``success``, else ``info["won"]``, else ``False``.
        score: the adapter's ``score``, else ``info["score"]``, else the return so far, clipped to [0, 1].
        invalid_action: ``info["invalid_action"]``, else ``False``.
        reward: reward of the action; 0 after ``reset``.
        rewards: ``info["rewards"]``, named rewards that are logged, in addition to the reward or as its parts; else empty.
        terminated: the task itself ended.
        truncated: a limit of the environment ended the episode.
        call: ``info["call"]``, an agent program's chat request, which the policy answers; ``None`` in other environments.
        calls: ``info["calls"]``, how many chat requests of an agent program were received, answered, cancelled and refused so far;
            else empty.
        refusal: ``info["refusal"]``, error message for the first refused chat request of an agent program, not counting
            requests that were refused because of a limit of the episode; else empty.
        answered: ``info["answered"]``, whether the action reached the agent program; else ``True``.
        info: the entries of ``info`` that JSON can represent, if the ``GuardedEnv`` was created with ``keep_info``; else empty.
    """

    observation: str
    task: str
    family: str
    admissible_actions: Sequence[str]
    won: bool = False
    score: float = 0.0
    invalid_action: bool = False
    reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    call: ChatCall | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    refusal: str = ""
    answered: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


class GuardedEnv:
    """One instance of a text environment, created at its first reset.

    Every call either returns a result that follows the contract of text environments, or raises an
    :class:`~trial_ray.errors.EnvironmentFaultError` with the environment, task, turn and cause. Only ``Exception`` and
    ``SystemExit`` are caught.

    Args:
        entry: the environment.
        required: keys that ``info`` must contain at the end of an episode.
        keep_info: whether results contain ``info``.

    Attributes:
        name: name of the environment in recorded trajectories.
        adapter: adapter of the environment.
        faulty: whether a call failed; the instance must then not be used again.
        max_turns: number of turns at which an episode is truncated.
        info_keys: keys that ``info`` has contained so far.
    """

    def __init__(self, entry: EnvironmentEntry, required: Collection[str] = (), keep_info: bool = False) -> None:
        self.name, self.adapter = entry.name, entry.adapter
        self.faulty = False
        self.info_keys: set[str] = set()
        # Store the limit: computing it inspects a signature, and the episode loop reads the limit in every turn.
        self.max_turns = entry.max_turns
        self._entry = entry
        self._required = tuple(required)
        self._keep_info = keep_info
        self._env: gymnasium.Env[Any, Any] | None = None
        self._task_id = ""
        self._turn = 0
        self._return = 0.0

    def make(self, task_id: str) -> gymnasium.Env[Any, Any]:
        """Return the instance, which is created if it does not exist; error messages name the task ``task_id``.

        Raises:
            EnvironmentFaultError: the instance could not be created.
        """
        self._task_id = task_id
        if self._env is None:
            self._env = self._call("creation", self._entry.make)
        return self._env

    def reset(self, task_id: str, seed: int) -> StepResult:
        """Start an episode of a task; if the environment lists no tasks, the task's id is the seed.

        Raises:
            EnvironmentFaultError: the environment could not be created, ``reset`` raised an error, or its result breaks the
                contract of text environments.
        """
        self.make(task_id)
        self._turn, self._return = 0, 0.0
        return self._call("reset", lambda: self._start(task_id, seed))

    def step(self, action: str) -> StepResult:
        """Carry out an action of the running episode.

        Raises:
            EnvironmentFaultError: ``step`` raised an error, or its result breaks the contract of text environments.
        """
        self._turn += 1
        return self._call(f"turn {self._turn}", lambda: self._read_step(self._created_env().step(action)))

    def walkthrough(self) -> tuple[str, ...]:
        """Return the environment's own solution of the running task; empty without a solution.

        Raises:
            EnvironmentFaultError: the environment raised an error, or the solution is not a list of actions.
        """
        return self._call(
            "walkthrough",
            lambda: tuple(_texts("walkthrough", getattr(self._created_env().unwrapped, "walkthrough", ()))),
        )

    def is_waiting(self) -> bool:
        """Return whether an agent program still waits for the answer to its chat request.

        Raises:
            EnvironmentFaultError: the environment raised an error.
        """
        return self._call("is_waiting", lambda: bool(self._created_env().unwrapped.is_waiting()))  # type: ignore[attr-defined]

    def commands_to_win(self) -> int | None:
        """Return how many actions the environment's own planner needs to win from the current state.

        ``None`` means that the environment has no planner, or that the planner finds no plan.

        Raises:
            EnvironmentFaultError: the planner raised an error.
        """
        planner = getattr(self._created_env().unwrapped, "commands_to_win", None)
        return None if planner is None else self._call("commands_to_win", planner)

    def max_instances(self) -> int | None:
        """Return how many instances of the environment may run at the same time; ``None`` if the environment states no limit.

        Raises:
            EnvironmentFaultError: the environment raised an error.
        """
        return self._call("max_instances", lambda: getattr(self._created_env().unwrapped, "max_instances", None))

    def close(self) -> None:
        """Close the instance, if it was created; an error is logged and not raised."""
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                logger.warning("%s could not be closed", self._entry.env_id, exc_info=True)

    def _created_env(self) -> gymnasium.Env[Any, Any]:
        if self._env is None:
            raise RuntimeError("No episode was started; call reset() first.")
        return self._env

    def _call(self, stage: str, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except ContractError as error:
            raise self._fault(stage, str(error), error) from error
        except (Exception, SystemExit) as error:  # sys.exit() in an environment must not end other episodes.
            raise self._fault(stage, first_line(error), error) from error

    def _fault(self, stage: str, cause: str, error: BaseException) -> EnvironmentFaultError:
        self.faulty = True
        message = f"{self._entry.env_id}, task {self._task_id!r}, {stage}: {cause}"
        # The driver receives only the error message, so the environment's traceback is logged here.
        logger.warning(message, exc_info=error)
        return EnvironmentFaultError(message, getattr(getattr(self._env, "unwrapped", None), "call_counts", None))

    def _start(self, task_id: str, seed: int) -> StepResult:
        env = self._created_env()
        if callable(getattr(env.unwrapped, "tasks", None)):
            answer = env.reset(seed=seed, options={"task": task_id})
        else:
            answer = env.reset(seed=int(task_id))
        observation, info = _parts("reset", answer, ("observation", "info"))
        return self._result(observation, info)

    def _read_step(self, answer: Any) -> StepResult:
        names = ("observation", "reward", "terminated", "truncated", "info")
        observation, reward, terminated, truncated, info = _parts("step", answer, names)
        _require_finite("reward", reward)
        self._return += float(reward)
        _require_finite("return", self._return)
        ends = _truth("terminated", terminated), _truth("truncated", truncated)
        result = self._result(observation, info, float(reward), terminated=ends[0], truncated=ends[1])
        if any(ends) and (missing := [key for key in self._required if key not in info]):
            raise ContractError(
                f"info lacks {', '.join(map(repr, missing))} at the end of an episode, which the reward needs; add it to info, or "
                "define when an episode is won with EnvironmentAdapter(success=...)"
            )
        return result

    def _result(self, observation: Any, info: Any, reward: float = 0.0, **ends: bool) -> StepResult:
        adapter = self._entry.adapter
        _require("observation", observation, "a str", isinstance(observation, str))
        _require("info", info, "a dict", isinstance(info, dict))
        self.info_keys.update(map(str, info))
        task, family = info.get("task", adapter.task), info.get("family", "")
        _require("info['task']", task, "a str", isinstance(task, str))
        _require("info['family']", family, "a str", isinstance(family, str))
        actions = _texts("info['admissible_actions']", info.get("admissible_actions", ()))
        _require_length(observation, task, family, *actions)
        return StepResult(
            observation=observation,
            task=task,
            family=family,
            admissible_actions=actions,
            won=_won(info, adapter, self._return),
            score=_score(info, adapter, self._return),
            invalid_action=_truth("info['invalid_action']", info.get("invalid_action", False)),
            reward=reward,
            rewards=named_rewards(info.get("rewards", {}), "info['rewards']"),
            call=None if (call := info.get("call")) is None else ChatCall(**call),
            calls=info.get("calls", {}),
            refusal=info.get("refusal", ""),
            answered=info.get("answered", True),
            info=_as_json(info) if self._keep_info else {},
            **ends,
        )


class ContractError(TypeError):
    """An environment's answer violates the contract of text environments."""


def _won(info: Mapping[str, Any], adapter: EnvironmentAdapter, episode_return: float) -> bool:
    if callable(adapter.success):
        return _truth("success(info, return)", adapter.success(info, episode_return))
    if adapter.success is not None:
        # A sum of rewards, such as ten times 0.1, may differ from the exact return by rounding.
        return bool(episode_return >= adapter.success or equal_up_to_rounding(episode_return, adapter.success))
    return _truth("info['won']", info.get("won", False))


def _score(info: Mapping[str, Any], adapter: EnvironmentAdapter, episode_return: float) -> float:
    if adapter.score is None and "score" not in info:
        return min(1.0, max(0.0, episode_return))
    name = "info['score']" if adapter.score is None else "score(info, return)"
    score = info["score"] if adapter.score is None else adapter.score(info, episode_return)
    in_range = isinstance(score, Real) and -ROUNDING <= float(score) <= 1 + ROUNDING
    return float(_require(name, score, "a number in [0, 1]", in_range))


def _as_json(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``info`` that JSON can represent, with lists in place of arrays."""
    entries = {}
    for name, value in info.items():
        with suppress(TypeError, ValueError, AttributeError, RecursionError):
            entries[str(name)] = json.loads(json.dumps(value, default=lambda array: array.tolist()))
    return entries


def named_rewards(value: Any, source: str) -> dict[str, float]:
    """Return named rewards as floats by name.

    Args:
        value: the named rewards.
        source: name of the value in the error message.

    Raises:
        ContractError: the value is not a dict of named rewards, or has too many of them.
    """
    expected = f"a dict of at most {MAX_REWARDS} finite numbers by name (letters, digits, '_', '.' and '-', at most 64)"
    valid = (
        isinstance(value, dict)
        and len(value) <= MAX_REWARDS
        and all(isinstance(name, str) and REWARD_NAME.fullmatch(name) for name in value)
        and all(isinstance(reward, Real) and math.isfinite(reward) for reward in value.values())
    )
    return {name: float(reward) for name, reward in _require(source, value, expected, valid).items()}


def _parts(method: str, answer: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    if not isinstance(answer, tuple | list) or len(answer) != len(names):
        raise ContractError(f"{method}() returned {_shown(answer)}; expected {len(names)} values: {', '.join(names)}")
    return tuple(answer)


def _truth(name: str, value: Any) -> bool:
    return bool(_require(name, value, "a bool", isinstance(value, bool | np.bool_)))


def _require_finite(name: str, value: Any) -> None:
    _require(name, value, "a finite number", isinstance(value, Real) and math.isfinite(value))


def _texts(name: str, value: Any) -> Sequence[str]:
    valid = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
    return _require(name, value, "a list of str", valid)


def _require_length(*texts: str) -> None:
    length = len(texts) + sum(map(len, texts))
    if length > MAX_CHARACTERS:
        raise ContractError(
            f"observation and info have texts of {length:,} characters; expected at most {MAX_CHARACTERS:,}"
        )


def _require(name: str, value: Any, expected: str, valid: bool) -> Any:
    if not valid:
        raise ContractError(f"{name} {_shown(value)}; expected {expected}")
    return value


def _shown(value: Any) -> str:
    """Return a value's ``repr`` and type on one line; the ``repr`` of an array may have several lines."""
    return f"{' '.join(repr(value).split()):.200} ({type(value).__name__})"


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, with at most 300 characters of the message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]:.300}" if lines else type(error).__name__


def required_keys(entry: EnvironmentEntry, reward: Any) -> tuple[str, ...]:
    """Return the keys that ``info`` must contain at the end of an episode to compute the reward, given the setting ``reward``."""
    return ("won",) if reward in ("success", "per_turn") and entry.adapter.success is None else ()

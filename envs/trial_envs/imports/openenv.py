"""``trial/OpenEnv-v0``: an environment on an OpenEnv server, as a Gymnasium text environment."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from numbers import Real
from typing import Any

from trial_envs.core import MAX_TEXT, Outcome, TextEnv
from trial_envs.core.levels import require_whole
from trial_envs.errors import (
    GeneratorSettingError,
    ServerAnswerError,
    ServerConnectionError,
    TrialEnvError,
    UnknownSplitError,
    UnknownTaskError,
)
from trial_envs.imports.openenv_client import ServerAnswer, ServerConnection

MAX_TASKS = 1_000_000
"""Maximum number of tasks of a split. The splits' first seeds are this far apart, so no two splits share a task."""
FIRST_SEEDS = {"train": 0, "test": MAX_TASKS}
"""Split -> seed of its first task."""
FAMILY = "openenv"
"""Family of a task if the server does not send a family."""


class OpenEnvEnv(TextEnv):
    """An environment on an OpenEnv server, with an action that has one text field.

    A task id that is a number is passed to the server's ``reset`` as ``seed``, any other id as ``task``. The server's
    observation may have the fields ``task``, ``family``, ``admissible_actions``, ``won``, ``score`` and ``invalid_action``,
    with the same meaning as in ``info``, and ``truncated``. If they are missing, the instruction and the list of actions are
    empty, an episode is won if it ends with a return of at least 1, and the score is the return, clipped to [0, 1].

    An error of the server or of the connection ends the episode; the next ``reset`` connects again.

    Args:
        url: URL of the server.
        action_field: name of the action's text field.
        observation_field: name of the observation's text field; if it is ``None``, the first field with a text is
            used, or the whole observation as JSON if there is no such field.
        split: ``train`` or ``test``; their tasks have different seeds.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        num_tasks: number of tasks that ``tasks()`` lists, at most a million.
        timeout_s: seconds for connecting and for each ``reset`` and ``step``.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError: see :mod:`trial_envs.errors`; ``reset`` and ``step`` raise ``RemoteEnvError``,
            ``ServerConnectionError``, ``ServerTimeoutError`` and ``ServerAnswerError``.
    """

    keeps_case = True

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        action_field: str = "action",
        observation_field: str | None = None,
        split: str = "train",
        max_turns: int = 50,
        num_tasks: int = 256,
        timeout_s: float = 30.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(split, max_turns, render_mode)
        require_whole(1, num_tasks=num_tasks)
        if num_tasks > MAX_TASKS or not 0 < timeout_s < math.inf:
            raise GeneratorSettingError(
                f"Expected num_tasks of at most {MAX_TASKS} and a positive timeout_s, got {num_tasks} and {timeout_s}."
            )
        if not isinstance(url, str) or url.partition("://")[0] not in ("http", "https", "ws", "wss"):
            raise GeneratorSettingError(f"Expected a url such as http://127.0.0.1:8000, got {url!r:.200}.")
        self._url, self._timeout_s = url, timeout_s
        self._action_field, self._observation_field = action_field, observation_field
        self._num_tasks = num_tasks
        self._connection: ServerConnection | None = None
        self._family = FAMILY
        self._return = 0.0
        self._truncated = False
        self.tasks()  # Raises UnknownSplitError if the split is unknown.

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own): the split's seeds, ascending."""
        first = FIRST_SEEDS.get(split or self.split)
        if first is None:
            raise UnknownSplitError(f"OpenEnv has no split {split or self.split!r}; expected one of {[*FIRST_SEEDS]}.")
        return [str(first + n) for n in range(self._num_tasks)]

    def family(self, task_id: str) -> str:
        """Return the task family that the server sent for the running episode, else ``"openenv"``."""
        return self._family

    @property
    def max_instances(self) -> int | None:
        """Maximum number of environments that can use the server at a time, from its path ``/limits``; ``None`` if unknown."""
        address = self._url.replace("ws", "http", 1) if self._url.startswith("ws") else self._url
        try:
            with urllib.request.urlopen(f"{address.rstrip('/')}/limits", timeout=self._timeout_s) as answer:
                limit = json.load(answer)["max_sessions"]
        except (OSError, ValueError, KeyError, TypeError, HTTPException):
            return None  # The server lacks this path or cannot be reached; in the latter case, reset() raises an error.
        return limit if isinstance(limit, int) else None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See :meth:`trial_envs.core.TextEnv.step`; if the server truncates the episode, ``truncated`` is true."""
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, terminated and not self._truncated, truncated or (terminated and self._truncated), info

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        if not task_id:
            raise UnknownTaskError("Expected a seed, or a task of the server, got an empty task id.")
        arguments = {"seed": int(task_id)} if task_id.isdecimal() and len(task_id) < 20 else {"task": task_id}
        self._return = 0.0
        answer = self._reset_server(arguments)
        fields = self._fields(answer)
        self._family = _value(fields, "family", str, FAMILY)
        return _value(fields, "task", str, ""), self._outcome(answer, fields)

    def _advance(self, action: str) -> Outcome:
        assert self._connection is not None
        if not self._connection.belongs_here:
            raise ServerConnectionError("The connection belongs to the process that started the episode; call reset().")
        try:
            answer = self._connection.step({self._action_field: action})
            return self._outcome(answer, self._fields(answer))
        except TrialEnvError:
            self._disconnect()  # A late answer on this connection would be read as the answer to the next request.
            raise

    def _free(self) -> None:
        self._disconnect()

    def _reset_server(self, arguments: dict[str, Any]) -> ServerAnswer:
        """Reset over the existing connection; if this fails, or there is no connection, reset over a new connection."""
        if self._connection is not None and self._connection.belongs_here:
            try:
                return self._connection.reset(**arguments)
            except TrialEnvError:
                self._disconnect()
        self._connection = ServerConnection(self._url, self._timeout_s)
        try:
            return self._connection.reset(**arguments)
        except TrialEnvError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fields(self, answer: ServerAnswer) -> Mapping[str, Any]:
        if not isinstance(answer.observation, dict):
            raise _unexpected("observation", answer.observation, "an object")
        return answer.observation

    def _outcome(self, answer: ServerAnswer, fields: Mapping[str, Any]) -> Outcome:
        reward = 0.0 if answer.reward is None else _number("reward", answer.reward)
        if not isinstance(answer.done, bool):
            raise _unexpected("done", answer.done, "true or false")
        self._return += reward
        actions = _value(fields, "admissible_actions", list, [])
        if not all(isinstance(action, str) for action in actions):
            raise _unexpected("admissible_actions", actions, "a list of texts")
        self._truncated = _value(fields, "truncated", bool, False)
        score = fields.get("score")
        return Outcome(
            observation=self._text(fields),
            admissible_actions=tuple(actions),
            reward=reward,
            score=min(1.0, max(0.0, self._return if score is None else _number("score", score))),
            won=_value(fields, "won", bool, answer.done and self._return >= 1.0),
            done=answer.done,
            invalid_action=_value(fields, "invalid_action", bool, False),
        )

    def _text(self, fields: Mapping[str, Any]) -> str:
        if self._observation_field is not None:
            text = fields.get(self._observation_field)
            if not isinstance(text, str):
                raise _unexpected(
                    self._observation_field, text, f"a text, in an observation with {list(fields)!r:.200}"
                )
        else:
            text = next((value for value in fields.values() if isinstance(value, str)), None)
            text = json.dumps(fields) if text is None else text
        if len(text) > MAX_TEXT:
            raise _unexpected("observation", text, f"at most {MAX_TEXT} characters")
        return text


def _value(fields: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _unexpected(name, value, f"a {kind.__name__}")
    return value


def _number(name: str, value: Any) -> float:
    with suppress(OverflowError):
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
    raise _unexpected(name, value, "a finite number")


def _unexpected(name: str, value: Any, expected: str) -> ServerAnswerError:
    return ServerAnswerError(f"the server's {name} is {value!r:.200} ({type(value).__name__}), expected {expected}")

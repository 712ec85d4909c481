"""RLlib's group of env runners, changed so that an exception does not end an env runner, and that env runners can be added."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from trial_ray.errors import CallbackError, InfrastructureError, UnsupportedError, first_line, refusing
from trial_ray.rllib_internals import RestartableGroup, add_env_runner, env_runner_actors, start_env_runner

logger = logging.getLogger(__name__)

CAUSE_TIMEOUT_S = 10.0
"""Seconds to wait for the error with which an env runner failed to start."""
PLAY = "play"
"""Name of Ray's concurrency group for calls that play groups; its event loop runs in a thread of its own."""
MAX_GROUPS = 10_000
"""Maximum number of groups that an env runner has at once; further groups wait in Ray."""


@refusing(
    {
        "reset": "env runners are connected to engines; build another algorithm",
        "foreach_env foreach_env_with_context foreach_policy foreach_policy_to_train is_policy_to_train add_policy": (
            "it is of RLlib's old API stack; foreach_env_runner() reaches the env runners"
        ),
    }
)
class TextEnvRunnerGroup(RestartableGroup):
    """RLlib's group of env runners; an exception of a function in :meth:`foreach_env_runner` does not end an env runner."""

    concurrency_groups: ClassVar[dict[str, int]] = {PLAY: MAX_GROUPS}

    def add_workers(self, num_workers: int, validate: bool = False) -> None:
        """Create the env runners of a new group; RLlib calls this method.

        Raises:
            UnsupportedError: the group has env runners already; further env runners would not be connected to the engines.
        """
        if self.num_remote_env_runners():
            raise UnsupportedError(
                "TextEnvRunnerGroup.add_workers() is not supported: set .env_runners(num_env_runners=(minimum, maximum)), and "
                "the number of env runners changes automatically."
            )
        super().add_workers(num_workers, validate)

    def get_spaces(self) -> dict[str, Any]:
        """Return RLlib's spaces from one of the env runners.

        Raises:
            InfrastructureError: no env runner has started; the message has the cause.
        """
        try:
            return super().get_spaces()
        except IndexError as error:
            raise InfrastructureError(f"No env runner could start: {_cause(self)}") from error

    def foreach_env_runner(self, func: Any, **options: Any) -> list[Any]:
        """Call a function, or a method by name, on env runners, as in RLlib; return the results of the live env runners.

        In RLlib itself, a function that raises ends the env runner with all its rollouts, and only the env runner's log
        shows the error.

        Args:
            func: function, method name, or a list of either with one entry per env runner.
            options: further arguments of RLlib's method; with ``return_obj_refs=True``, exceptions are handled as in RLlib.

        Raises:
            CallbackError: the function raised on one or more env runners, which continue; the message names the first of them.
        """
        if options.get("return_obj_refs"):
            return list(super().foreach_env_runner(func, **options))
        guarded = [_guarded(call) for call in func] if isinstance(func, list) else _guarded(func)
        answers: list[Any] = super().foreach_env_runner(guarded, **options)
        for answer in answers:
            if isinstance(answer, _Raised):
                error = CallbackError(f"A function of foreach_env_runner() raised on {answer.place}: {answer.error}")
                error.add_note(answer.trace)
                raise error
        return answers


def _cause(group: TextEnvRunnerGroup) -> str:
    """Return the error that an env runner raised when it was created; RLlib only logs it."""
    for actor in env_runner_actors(group).values():
        try:
            ray.get(actor.ping.remote(), timeout=CAUSE_TIMEOUT_S)
        except RayError as error:
            return str(error).rstrip().rpartition("\n")[2]
    return "the cause is in logs/libraries.log of the run."


class _Raised(NamedTuple):
    """Exception that a function raised, as texts, because an exception may not be picklable.

    Attributes:
        place: name of the env runner.
        error: type and message.
        trace: the traceback.
    """

    place: str
    error: str
    trace: str


def _guarded(func: Callable[..., Any] | str) -> Callable[..., Any]:
    """Wrap a function, or a method name, for a call on an env runner; an exception is returned as :class:`_Raised`."""

    def call(runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if isinstance(func, str):
                return getattr(runner, func)(*args, **kwargs)
            return func(runner, *args, **kwargs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return _Raised(f"env runner {runner.worker_index}", text, traceback.format_exc())

    return call


PING_TIMEOUT_S = 120.0
"""Seconds to wait for the result of ``ping`` from an env runner that has started."""


class NewRunners:
    """Env runners that were requested from Ray and have not joined the group yet.

    Args:
        runners: the group that the env runners join.
    """

    def __init__(self, runners: EnvRunnerGroup) -> None:
        self._runners = runners
        self._pings: dict[ObjectRef[str], ActorHandle[Any]] = {}
        # Never use an env runner's number again: file names of recordings contain it.
        self._numbers = itertools.count(1 + runners.num_remote_env_runners())

    def request(self, count: int) -> None:
        """Request further env runners from Ray, without waiting for them."""
        for _ in range(count):
            handle: ActorHandle[Any] = start_env_runner(self._runners, next(self._numbers))
            self._pings[handle.ping.remote()] = handle

    def add_started(self) -> list[int]:
        """Add the requested env runners that have started to the group, without waiting for the others.

        A replacement is requested for each env runner that failed to start.

        Returns:
            The ids of the added env runners.
        """
        ready, _ = ray.wait([*self._pings], num_returns=len(self._pings), timeout=0) if self._pings else ([], [])
        added = []
        for ping in ready:
            handle = self._pings.pop(ping)
            try:
                ray.get(ping, timeout=PING_TIMEOUT_S)
            except RayError as error:
                logger.warning("an env runner did not start and is requested again: %s", first_line(error))
                self.request(1)
            else:
                added.append(add_env_runner(self._runners, handle))
        return added

    def withdraw(self) -> None:
        """End the requested env runners that have not joined the group."""
        for handle in self._pings.values():
            ray.kill(handle)
        self._pings = {}

"""The OpenEnv environment of a session, with its types of action, observation and state."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import BeforeValidator, Field

from trial_envs.errors import ClosedEnvError, EpisodeOverError, RemoteEnvError, SessionProcessError, UnknownOptionError
from trial_envs.openenv.processes import SessionProcess, SessionProcesses


def _encodable(value: object) -> object:
    """Replace lone surrogates in a text, which UTF-8 cannot encode, by question marks; return other values unchanged."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class TextAction(Action):
    """An action of a text environment.

    Attributes:
        action: text of the action; lone surrogates are replaced by question marks.
    """

    action: Annotated[str, BeforeValidator(_encodable)]


class TextObservation(Observation):
    """An observation of a text environment, with OpenEnv's ``reward`` and ``done``; see :mod:`trial_envs.core.text_env`.

    Attributes:
        text: the observation.
        admissible_actions: the actions that are possible now.
        task: the instruction.
        task_id: id of the task; ``reset(task=task_id)`` plays it again.
        family: the kind of task.
        won: whether the task is solved.
        score: in [0, 1].
        invalid_action: whether the engine did not understand the last action.
        truncated: whether the turn limit, not the task itself, ended the episode.
    """

    text: str
    admissible_actions: list[str]
    task: str
    task_id: str
    family: str
    won: bool
    score: float
    invalid_action: bool
    truncated: bool


class EpisodeState(State):
    """The state of a session.

    Attributes:
        task_id: task id of the running episode; empty before the first episode.
    """

    task_id: str = ""


def action_model(max_length: int) -> type[TextAction]:
    """Return a type of actions of at most ``max_length`` characters; the limit is also in the schema that the server publishes."""

    class LimitedAction(TextAction):
        __doc__ = TextAction.__doc__
        action: Annotated[str, BeforeValidator(_encodable), Field(max_length=max_length)]

    return LimitedAction


class SessionEnvironment(Environment[TextAction, TextObservation, EpisodeState]):
    """A text environment in a separate process, which starts at the first ``reset``.

    Args:
        processes: starts and ends the process.
        env_id: id of the environment.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, processes: SessionProcesses, env_id: str) -> None:
        super().__init__()
        self._processes = processes
        self._env_id = env_id
        self._process: SessionProcess | None = None
        self._closed = False
        self._state = EpisodeState()

    @property
    def state(self) -> EpisodeState:
        """Ids of the episode and of its task, and the number of steps."""
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the name and description of the environment."""
        described = f"{self._env_id} of trial_envs: a text environment, each session in its own process."
        return EnvironmentMetadata(name=self._env_id, description=described)

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, task: str | int | None = None, **unknown: Any
    ) -> TextObservation:
        """Start an episode.

        Args:
            seed: seeds the choice of the task.
            episode_id: id of the episode in the state.
            task: id or index of the task; without it, the task is drawn with the seed.

        Raises:
            UnknownOptionError: an unknown argument was given.
            ClosedEnvError: the session was closed, for example because it was idle for too long.
            RemoteEnvError: the environment rejected the request, for example an unknown task.
            SessionProcessError: the process could not be started, has ended, or did not answer in time.
        """
        if unknown:
            raise UnknownOptionError(f"reset() got {sorted(unknown)!r:.200}, expected seed, episode_id and task.")
        if self._closed:
            raise ClosedEnvError("The session was closed, as after a long idle time; connect again.")
        self._state = EpisodeState()
        if self._process is None:
            self._process = await asyncio.to_thread(self._processes.start)
            if self._closed:
                self.close()
                raise ClosedEnvError("The session was closed while it started; connect again.")
        observation = await self._ask("reset", seed, task)
        self._state = EpisodeState(episode_id=episode_id, task_id=observation.task_id)
        return observation

    async def step_async(self, action: TextAction, timeout_s: float | None = None, **unknown: Any) -> TextObservation:
        """Carry out an action.

        Raises:
            EpisodeOverError: no episode is running.
            RemoteEnvError: the environment rejected the request.
            SessionProcessError: the process ended or did not answer in time.
        """
        if self._process is None:
            raise EpisodeOverError("No episode is running: call reset() before step().")
        observation = await self._ask("step", action.action)
        self._state.step_count += 1
        return observation

    def reset(self, seed: int | None = None, episode_id: str | None = None, **arguments: Any) -> TextObservation:
        """See :meth:`reset_async`."""
        return asyncio.run(self.reset_async(seed, episode_id, **arguments))

    def step(self, action: TextAction, timeout_s: float | None = None, **arguments: Any) -> TextObservation:
        """See :meth:`step_async`."""
        return asyncio.run(self.step_async(action))

    def close(self) -> None:
        """End the process of the session. The environment cannot be used afterwards."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            self._processes.end(process)

    async def _ask(self, *request: Any) -> TextObservation:
        process = self._process
        assert process is not None
        try:
            return TextObservation(**await process.ask(*request))
        except RemoteEnvError:
            raise
        except BaseException as error:
            # End the process: a late answer to a cancelled request would be read as the answer to the next request.
            self._process = None
            await asyncio.to_thread(self._processes.end, process)
            if self._closed and isinstance(error, SessionProcessError):
                raise ClosedEnvError("The session was closed while it played; connect again.") from error
            raise

"""The base class of the text environments, and the ``info`` that all of them return.

An episode is one task. Observations and actions are plain strings. The engine is the simulator or library behind an
environment. After ``reset`` and every ``step``, ``info`` contains:

====================== ================================================================================
``task``               the instruction, without a prefix such as ``Your task is to:``
``task_id``            id of the task; ``reset(options={"task": id})`` plays it again
``family``             the kind of task
``admissible_actions`` list of the actions that are possible now; empty if the engine lists none
``won``                whether the task is solved
``score``              float in [0, 1]
``invalid_action``     whether the engine did not understand the last action (``False`` after ``reset``)
====================== ================================================================================

``terminated`` means that the task itself ended (it was won or lost, or a product was bought), ``truncated`` that a limit such
as ``max_turns`` was reached.
"""

from __future__ import annotations

import copy
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, SupportsIndex

import gymnasium

from trial_envs.core.levels import require_whole
from trial_envs.core.text_space import AnyText
from trial_envs.errors import ClosedEnvError, EpisodeOverError, RenderModeError, UnknownOptionError, UnknownTaskError


@dataclass(frozen=True)
class Outcome:
    """The engine's result for the start of an episode or for one action."""

    observation: str
    admissible_actions: tuple[str, ...]
    reward: float = 0.0
    score: float = 0.0
    won: bool = False
    done: bool = False
    invalid_action: bool = False
    truncated: bool = False


class TextEnv(gymnasium.Env[str, str]):
    """Base class of the text environments: choice of the task, turn limit, ``info`` and checks of the arguments.

    A subclass implements :meth:`tasks`, :meth:`family`, :meth:`_start`, :meth:`_advance` and :meth:`_free`.

    Args:
        split: the split that ``reset`` draws tasks from.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        render_mode: ``"ansi"`` or ``None``; see :meth:`render`.

    Raises:
        RenderModeError: ``render_mode`` has another value.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]
    keeps_case: ClassVar[bool] = False
    """Whether actions are case-sensitive; otherwise the action in a response is lower-cased."""
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Store the constructor's arguments, for :meth:`__reduce__`."""
        env = super().__new__(cls)
        env._made_with = (args, settings)
        return env

    def __init__(self, split: str, max_turns: int, render_mode: str | None = None) -> None:
        require_whole(1, max_turns=max_turns)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise RenderModeError(
                f"{type(self).__name__} got render_mode={render_mode!r}, expected 'ansi' or None: there is no window, and "
                "render() returns text with render_mode='ansi'."
            )
        self.split = split
        self.max_turns = int(max_turns)
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._task_id = ""
        self._instruction = ""
        self._actions: list[str] = []
        self._playing = False
        self._closed = False
        self._last_observation = ""

    @abstractmethod
    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the task ids of a split (default: the environment's own), in the same order in every process."""

    @abstractmethod
    def family(self, task_id: str) -> str:
        """Return the kind of the task with this id; empty if the environment has no kinds."""

    @abstractmethod
    def _start(self, task_id: str) -> tuple[str, Outcome]:
        """Start the task; return its instruction and the first outcome."""

    @abstractmethod
    def _advance(self, action: str) -> Outcome:
        """Carry out one action."""

    @abstractmethod
    def _free(self) -> None:
        """Free the engine's resources; called at most once."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the choice of this task and of later tasks; ``None`` continues with the current random state.
            options: ``{"task": id}`` plays the task with this id, ``{"task": index}`` the task ``tasks()[index]``. If no task
                is given, one of ``tasks()`` is drawn at random.

        Raises:
            UnknownTaskError: no task has this id or index.
            UnknownOptionError: ``options`` has a key other than ``"task"``.
            ClosedEnvError: the environment was closed.
        """
        self._refuse_closed()
        super().reset(seed=seed)
        self._playing = False
        self._task_id, self._last_observation = "", ""
        self._actions.clear()
        task_id = self._choose_task(options)
        self._instruction, outcome = self._start(task_id)
        self._task_id, self._playing = task_id, True
        self._last_observation = outcome.observation
        return outcome.observation, self._info(outcome)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out one action; a string that the engine does not understand takes a turn and changes nothing.

        Raises:
            EpisodeOverError: ``reset`` was not called, or the episode has ended.
            ClosedEnvError: the environment was closed.
            TypeError: the action is not a string.
        """
        self._refuse_closed()
        if not self._playing:
            raise EpisodeOverError("No episode is running: call reset() before step().")
        if not isinstance(action, str):
            raise TypeError(f"Expected an action of type str, got {type(action).__name__}.")
        self._playing = False  # If the action raises an exception, the episode cannot continue.
        outcome = self._advance(action)
        self._actions.append(action)
        truncated = not outcome.done and (outcome.truncated or len(self._actions) >= self.max_turns)
        self._playing = not (outcome.done or truncated)
        self._last_observation = outcome.observation
        return outcome.observation, outcome.reward, outcome.done, truncated, self._info(outcome)

    def render(self) -> str | None:  # type: ignore[override]
        """Return the last action and the observation after it if ``render_mode="ansi"``, else ``None``."""
        if self.render_mode != "ansi":
            return None
        prompt = f"> {self._actions[-1]}\n" if self._actions else ""
        return f"{prompt}{self._last_observation}\n"

    def close(self) -> None:
        """Free the engine; the environment cannot be used afterwards. Repeated calls have no effect."""
        if not self._closed:
            self._closed = True
            self._playing = False
            self._free()

    def __reduce__(self) -> tuple[Any, ...]:
        """Support ``copy`` and ``pickle``: a copy is constructed with the same arguments and replays the last episode.

        Copies share no state with the original.
        """
        episode = (self._task_id, tuple(self._actions)) if self._task_id and not self._closed else None
        generator = copy.deepcopy(self._np_random)
        state = {"spec": self.spec, "_np_random": generator, "_np_random_seed": self._np_random_seed}
        return _make_again, (type(self), *self._made_with, state, episode, self._playing, self._closed)

    def _choose_task(self, options: Mapping[str, Any] | None) -> str:
        arguments = {} if options is None else options
        if not isinstance(arguments, Mapping) or set(arguments) - {"task"}:
            raise UnknownOptionError(
                f"reset() got the options {arguments!r:.200}, expected a dict with the only key 'task'."
            )
        requested = arguments.get("task")
        if isinstance(requested, str):
            return requested
        if requested is not None:
            return self._task_at(_index(requested))
        tasks = self.tasks()
        if not tasks:
            raise UnknownTaskError(f"The split {self.split!r} has no tasks; choose another split.")
        return tasks[int(self.np_random.integers(len(tasks)))]

    def _task_at(self, index: int) -> str:
        """Return the id of the task with this index in :meth:`tasks`."""
        tasks = self.tasks()
        if not 0 <= index < len(tasks):
            raise UnknownTaskError(f"The split {self.split!r} has {len(tasks)} tasks, got the task index {index}.")
        return tasks[index]

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "task": self._instruction,
            "task_id": self._task_id,
            "family": self.family(self._task_id),
            "admissible_actions": list(outcome.admissible_actions),
            "won": outcome.won,
            "score": outcome.score,
            "invalid_action": outcome.invalid_action,
        }

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ClosedEnvError("The environment was closed; make a new one.")


def _index(requested: object) -> int:
    try:
        if isinstance(requested, SupportsIndex) and not isinstance(requested, bool):
            if (index := int(operator.index(requested))).bit_length() <= 64:
                return index
            raise UnknownTaskError(f"Expected an index into tasks(), got an integer of {index.bit_length()} bits.")
    except TypeError:  # A NumPy array has __index__, which raises TypeError unless the array has a single element.
        pass
    raise UnknownTaskError(f"Expected a task id (str) or an index into tasks() (int), got {requested!r:.200}.")


def _make_again(
    cls: type[TextEnv],
    args: tuple[Any, ...],
    settings: dict[str, Any],
    state: dict[str, Any],
    episode: tuple[str, tuple[str, ...]] | None,
    playing: bool,
    closed: bool,
) -> TextEnv:
    env = cls(*args, **settings)
    env.__dict__.update(state)
    if episode is not None:
        task_id, actions = episode
        env.reset(options={"task": task_id})
        for action in actions:
            env.step(action)
    env._playing = playing
    if closed:
        env.close()
    return env

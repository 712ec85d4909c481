"""The contract that every text environment of this package keeps.

An episode is one task. Observations and actions are plain strings; ``info`` holds, after ``reset`` and every ``step``:

================== =====================================================================
``task``           the instruction, without the engine's lead-in
``task_id``        the id under which ``reset(options={"task": id})`` plays the same task again
``family``         the kind of task
``admissible_actions``  list of the actions that mean something now, in the engine's order
``won``            whether the task is solved
``score``          float in [0, 1]
``invalid_action`` whether the last action was none that the engine understood (``False`` after ``reset``)
================== =====================================================================

``terminated`` says that the task itself ended (won, bought); ``truncated`` that ``max_turns`` actions were used up.
"""

from __future__ import annotations

import string
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Text

from trial_envs.errors import ClosedEnvError, EpisodeOverError, UnknownTaskError

MAX_TEXT = 1_000_000
"""Upper limit of the length of observations and actions, in characters."""


class AnyText(Text):
    """A ``Text`` space that contains every string up to its maximal length, whatever its characters.

    Product pages and model replies hold characters of every script; samples are printable ASCII.
    """

    def __init__(self, max_length: int = MAX_TEXT, *, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.printable, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string of at most ``max_length`` characters."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short printable string; a uniform length up to ``max_length`` would be useless as an action."""
        length = int(self.np_random.integers(1, 31))
        return "".join(self.np_random.choice(list(self.character_list), size=length))


@dataclass(frozen=True)
class Outcome:
    """What the engine answered: to the start of an episode or to one action."""

    observation: str
    admissible_actions: tuple[str, ...]
    reward: float = 0.0
    score: float = 0.0
    won: bool = False
    done: bool = False
    invalid_action: bool = False


class TextEnv(gymnasium.Env[str, str]):
    """Base of the text environments: choice of the task, the turn limit, ``info``, and the guards around an engine.

    A subclass implements :meth:`tasks`, :meth:`family`, :meth:`_start`, :meth:`_advance` and :meth:`_free`.

    Args:
        split: the split that ``reset`` draws tasks from.
        max_turns: actions after which an episode is truncated.
        render_mode: ``"ansi"`` or ``None``; see :meth:`render`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]

    def __init__(self, split: str, max_turns: int, render_mode: str | None = None) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}; an episode needs at least one turn")
        self.split = split
        self.max_turns = max_turns
        self.render_mode = render_mode
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._task_id = ""
        self._instruction = ""
        self._turns = 0
        self._playing = False
        self._closed = False
        self._last_action: str | None = None
        self._last_observation = ""

    @abstractmethod
    def tasks(self, split: str | None = None) -> Sequence[str]:
        """The task ids of a split (default: the environment's own) in an order that depends on nothing but the data."""

    @abstractmethod
    def family(self, task_id: str) -> str:
        """The kind of task behind an id."""

    @abstractmethod
    def _start(self, task_id: str) -> tuple[str, Outcome]:
        """Starts the task; returns its instruction and the first outcome."""

    @abstractmethod
    def _advance(self, action: str) -> Outcome:
        """Carries out one action."""

    @abstractmethod
    def _free(self) -> None:
        """Frees whatever the engine holds; called at most once."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: seeds the choice of the task (and of later tasks, as in every Gymnasium environment).
            options: ``{"task": id}`` plays that task; without it the seed chooses one of ``tasks()``.

        Raises:
            UnknownTaskError: the id names no task, or an option is not known.
            ClosedEnvError: after ``close``.
        """
        self._refuse_closed()
        super().reset(seed=seed)
        self._playing = False
        self._task_id = self._choose_task(options or {})
        self._instruction, outcome = self._start(self._task_id)
        self._turns = 0
        self._playing = True
        self._last_action, self._last_observation = None, outcome.observation
        return outcome.observation, self._info(outcome)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out one action; a string that the engine does not understand costs a turn and changes nothing.

        Raises:
            EpisodeOverError: before ``reset`` and after the episode ended.
            ClosedEnvError: after ``close``.
        """
        self._refuse_closed()
        if not self._playing:
            raise EpisodeOverError("no episode is running: call reset() before step()")
        if not isinstance(action, str):
            raise TypeError(f"an action is a str, found {type(action).__name__}")
        outcome = self._advance(action)
        self._turns += 1
        truncated = not outcome.done and self._turns >= self.max_turns
        self._playing = not (outcome.done or truncated)
        self._last_action, self._last_observation = action, outcome.observation
        return outcome.observation, outcome.reward, outcome.done, truncated, self._info(outcome)

    def render(self) -> str | None:  # type: ignore[override]
        """The last action and the text that answered it (``render_mode="ansi"``)."""
        if self.render_mode != "ansi":
            return None
        prompt = "" if self._last_action is None else f"> {self._last_action}\n"
        return f"{prompt}{self._last_observation}\n"

    def close(self) -> None:
        """Frees the engine; the environment cannot be used afterwards. May be called again."""
        if not self._closed:
            self._closed = True
            self._playing = False
            self._free()

    def _choose_task(self, options: dict[str, Any]) -> str:
        unknown = sorted(set(options) - {"task"})
        if unknown:
            raise UnknownTaskError(f"reset() got the options {unknown}; the only option is 'task'")
        if options.get("task") is not None:
            return str(options["task"])
        tasks = self.tasks()
        if not tasks:
            raise UnknownTaskError(f"the split {self.split!r} holds no task to choose from")
        return tasks[int(self.np_random.integers(len(tasks)))]

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
            raise ClosedEnvError("the environment was closed; make a new one")

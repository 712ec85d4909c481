"""Scripted policies for ALFWorld, which use only the texts that a trained policy also reads."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trial_envs.alfworld.families import TASK_PREFIX
from trial_envs.alfworld.household import CONTAINS

_LAMP_TASK = re.compile(r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<target>\w+)")
_TREAT_FIRST = re.compile(r"(?P<verb>clean|heat|cool) some (?P<object>\w+) and put it in (?P<target>\w+)")
_TREATED = re.compile(r"put a (?P<verb>clean|hot|cool) (?P<object>\w+) in (?P<target>\w+)")
_TWO = re.compile(r"(?:put two|find two) (?P<object>\w+) (?:in|and put them in) (?P<target>\w+)")
_PLAIN = re.compile(r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<target>\w+)")

_TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_HOLDERS: dict[str, frozenset[str]] = {
    receptacle.lower(): frozenset(kind.lower() for kind in kinds) for receptacle, kinds in CONTAINS.items()
}


@dataclass(frozen=True)
class ParsedTask:
    """The object, target and treatment that a task's instruction names, in the same words as in observations."""

    object: str
    target: str
    treatment: str | None = None
    """``clean``, ``heat`` or ``cool``; ``None`` if the object needs no treatment."""
    lamp: bool = False


def read_task(sentence: str) -> ParsedTask | None:
    """Parse an instruction, with or without ``Your task is to:``; return ``None`` for any other sentence."""
    text = sentence.strip().removeprefix(TASK_PREFIX.strip()).strip().rstrip(".")
    if match := _LAMP_TASK.fullmatch(text):
        return ParsedTask(match["object"], match["target"], lamp=True)
    if match := _TREAT_FIRST.fullmatch(text) or _TREATED.fullmatch(text):
        return ParsedTask(match["object"], match["target"], match["verb"].replace("hot", "heat"))
    if match := _TWO.fullmatch(text) or _PLAIN.fullmatch(text):
        return ParsedTask(match["object"], match["target"])
    return None


class ExplorerOracle:
    """A policy that uses only the task, the observations so far and the admissible commands.

    The policy searches the receptacles in random order, first the receptacles that can contain the object. It takes the object
    when it sees the object, cleans, heats or cools the object if required, and puts it into a receptacle of the target's type;
    in a task with a lamp, it carries the object to the lamp and switches the lamp on. If the task needs a second object, the
    policy puts it into the same receptacle. The policy keeps a list of the receptacles that it has searched.
    """

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode; ``task`` is the environment's ``info["task"]``."""
        self._task = read_task(task)
        self._random = random.Random(seed)
        self._last = ""
        self._carried: str | None = None
        self._treated = False
        self._searched: set[str] = set()
        self._opened: set[str] = set()
        self._used_receptacle: str | None = None
        self._lamp_receptacle: str | None = None
        self._receptacle = ""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return the next command, one of the admissible commands."""
        options = self.options(observation, admissible)
        self._last = options[0] if len(options) == 1 else self._random.choice(options)
        return self._last

    def options(self, observation: str, admissible: Sequence[str]) -> list[str]:
        """Return the commands from which :meth:`act` draws in this turn.

        The list has a single command, unless the policy can choose which receptacle to search next, or cannot parse the task.
        """
        self._update(observation, admissible)
        return self._choose(admissible)

    def carried_out(self, action: str) -> None:
        """Record that ``action`` was carried out instead of the command returned by :meth:`act`."""
        self._last = action

    def _update(self, observation: str, admissible: Sequence[str]) -> None:
        """Record the effects of the last command and the receptacles whose content the agent has seen."""
        words = self._last.split()
        if observation.startswith("Nothing happens") or not words:
            return
        if words[0] == "take":
            self._carried, self._treated = " ".join(words[1:3]), False
        elif words[0] == "move":
            self._carried, self._used_receptacle = None, " ".join(words[-2:])
        elif words[0] in _TOOLS:
            self._treated = True
        elif words[0] == "open":
            self._opened.add(" ".join(words[1:]))
        elif words[0] == "go":
            self._receptacle = " ".join(words[2:])
        here = {command.removeprefix("examine ") for command in admissible if command.startswith("examine ")}
        self._searched |= here - {command.removeprefix("open ") for command in admissible}
        if self._task and self._task.lamp and _first(admissible, f"use {self._task.target} "):
            self._lamp_receptacle = self._receptacle

    def _choose(self, admissible: Sequence[str]) -> list[str]:
        task = self._task
        if task is None:
            return list(admissible)
        if self._carried is None:
            chosen = self._take(task, admissible)
        elif task.treatment and not self._treated:
            chosen = _first(admissible, f"{task.treatment} {self._carried} with ") or _first(
                admissible, f"go to {_TOOLS[task.treatment]} "
            )
        elif task.lamp:
            chosen = self._light(task, admissible)
        else:
            chosen = self._put(task, admissible)
        searched_for = task.target if task.lamp and self._carried else task.object
        return [chosen] if chosen else self._search(searched_for, admissible)

    def _take(self, task: ParsedTask, admissible: Sequence[str]) -> str | None:
        """Return a command that takes an object of the task's type, else ``None``.

        Objects in the receptacle into which the last object was put are not taken.
        """
        wanted = [
            command
            for command in admissible
            if command.startswith(f"take {task.object} ") and not command.endswith(f" from {self._used_receptacle}")
        ]
        return wanted[0] if wanted else None

    def _light(self, task: ParsedTask, admissible: Sequence[str]) -> str | None:
        return _first(admissible, f"use {task.target} ") or (
            f"go to {self._lamp_receptacle}" if f"go to {self._lamp_receptacle}" in admissible else None
        )

    def _put(self, task: ParsedTask, admissible: Sequence[str]) -> str | None:
        target = self._used_receptacle or f"{task.target} "
        return (
            _first(admissible, f"move {self._carried} to {target}")
            or _first(admissible, f"open {target}")
            or _first(admissible, f"go to {target}")
        )

    def _search(self, wanted: str, admissible: Sequence[str]) -> list[str]:
        """Return the command that opens a receptacle at the agent's location, else commands that go to unsearched receptacles."""
        for command in admissible:
            if command.startswith("open ") and command.removeprefix("open ") not in self._opened:
                return [command]
        moves = [command for command in admissible if command.startswith("go to ")]
        fresh = [command for command in moves if command.removeprefix("go to ") not in self._searched]
        if not fresh:
            self._searched.clear()
            fresh = moves
        likely = [command for command in fresh if _can_hold(command.split()[2], wanted)]
        return likely or fresh or list(admissible)


class ForgetfulExplorer(ExplorerOracle):
    """An :class:`ExplorerOracle` that does not record where it has searched for the object and for the lamp.

    It may therefore search a receptacle again, although the object or the lamp is not there.

    Its commands depend only on the task, the last observation and the list of admissible commands (and on two facts: whether
    the object was cleaned, heated or cooled, and into which receptacle the last object was put). A policy with this
    information can therefore infer from which commands the explorer draws.
    """

    def _light(self, task: ParsedTask, admissible: Sequence[str]) -> str | None:
        return _first(admissible, f"use {task.target} ")

    def _search(self, wanted: str, admissible: Sequence[str]) -> list[str]:
        closed = [command for command in admissible if command.startswith("open ")]
        moves = [command for command in admissible if command.startswith("go to ")]
        return closed[:1] or moves or list(admissible)


def _can_hold(receptacle: str, wanted: str) -> bool:
    """Return whether a type of receptacle can contain an object; types that are not in :data:`_HOLDERS` can contain any object."""
    if wanted.endswith("lamp"):
        return receptacle in ("desk", "sidetable", "dresser", "shelf", "diningtable", "coffeetable")
    return receptacle not in _HOLDERS or wanted in _HOLDERS[receptacle]


def _first(admissible: Sequence[str], prefix: str) -> str | None:
    return next((command for command in admissible if command.startswith(prefix)), None)

"""Two players that know how to win: one from the solution, one from what a player sees."""

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


class WalkthroughOracle:
    """Replays a game's own solution, ``env.unwrapped.walkthrough``."""

    def reset(self, walkthrough: Sequence[str]) -> None:
        """Starts at the first command of the solution."""
        self._remaining = list(walkthrough)

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """The next command; ``look`` when there is none left."""
        return self._remaining.pop(0) if self._remaining else "look"


@dataclass(frozen=True)
class Errand:
    """What a task sentence asks for, in the player's words."""

    object: str
    target: str
    treatment: str | None = None
    """``clean``, ``heat`` or ``cool``."""
    lamp: bool = False


def read_task(sentence: str) -> Errand | None:
    """Reads a task sentence, with or without ``Your task is to:``; ``None`` if it is none of the six kinds."""
    text = sentence.strip().removeprefix(TASK_PREFIX.strip()).strip().rstrip(".")
    if found := _LAMP_TASK.fullmatch(text):
        return Errand(found["object"], found["target"], lamp=True)
    if found := _TREAT_FIRST.fullmatch(text) or _TREATED.fullmatch(text):
        return Errand(found["object"], found["target"], found["verb"].replace("hot", "heat"))
    if found := _TWO.fullmatch(text) or _PLAIN.fullmatch(text):
        return Errand(found["object"], found["target"])
    return None


class ExplorerOracle:
    """Plays as a person would who knows only the task, what was answered so far, and what can be done now.

    It looks into one receptacle after the other in random order, those that can hold the object first; takes the
    object where it sees it, treats it, brings it to the first suitable place, and starts again until the game is won.
    What it does follows, as far as possible, from the last two turns, so that a policy with a short memory can learn
    it.
    """

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Starts an episode; ``task`` is ``info["task"]``."""
        self._errand = read_task(task)
        self._random = random.Random(seed)
        self._last = ""
        self._carried: str | None = None
        self._treated = False
        self._searched: set[str] = set()
        self._opened: set[str] = set()
        self._used_place: str | None = None
        self._lamp_place: str | None = None
        self._place = ""

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """The next command, one of the admissible ones."""
        self._notice(observation, admissible)
        self._last = self._choose(admissible)
        return self._last

    def carried_out(self, action: str) -> None:
        """Learns that ``action`` was carried out instead of the one it chose; the next observation answers it."""
        self._last = action

    def _notice(self, observation: str, admissible: Sequence[str]) -> None:
        """Takes note of what the last command brought about."""
        words = self._last.split()
        if observation.startswith("Nothing happens") or not words:
            return
        if words[0] == "take":
            self._carried, self._treated = " ".join(words[1:3]), False
        elif words[0] == "move":
            self._carried, self._used_place = None, " ".join(words[-2:])
        elif words[0] in _TOOLS:
            self._treated = True
        elif words[0] == "open":
            self._opened.add(" ".join(words[1:]))
        elif words[0] == "go":
            self._place = " ".join(words[2:])
        here = {command.removeprefix("examine ") for command in admissible if command.startswith("examine ")}
        self._searched |= here - {command.removeprefix("open ") for command in admissible}
        if self._errand and self._errand.lamp and _first(admissible, f"use {self._errand.target} "):
            self._lamp_place = self._place

    def _choose(self, admissible: Sequence[str]) -> str:
        errand = self._errand
        if errand is None:
            return self._random.choice(list(admissible))
        if self._carried is None:
            return self._take(errand, admissible) or self._search(errand.object, admissible)
        if errand.treatment and not self._treated:
            return (
                _first(admissible, f"{errand.treatment} {self._carried} with ")
                or _first(admissible, f"go to {_TOOLS[errand.treatment]} ")
                or self._search(errand.object, admissible)
            )
        if errand.lamp:
            return self._light(errand, admissible)
        return self._put(errand, admissible)

    def _take(self, errand: Errand, admissible: Sequence[str]) -> str | None:
        """Takes the object if it can be seen, but not one that was brought there before."""
        wanted = [
            command
            for command in admissible
            if command.startswith(f"take {errand.object} ") and not command.endswith(f" from {self._used_place}")
        ]
        return wanted[0] if wanted else None

    def _light(self, errand: Errand, admissible: Sequence[str]) -> str:
        return (
            _first(admissible, f"use {errand.target} ")
            or (f"go to {self._lamp_place}" if f"go to {self._lamp_place}" in admissible else None)
            or self._search(errand.target, admissible)
        )

    def _put(self, errand: Errand, admissible: Sequence[str]) -> str:
        place = self._used_place or f"{errand.target} "
        return (
            _first(admissible, f"move {self._carried} to {place}")
            or _first(admissible, f"open {place}")
            or _first(admissible, f"go to {place}")
            or self._search(errand.object, admissible)
        )

    def _search(self, wanted: str, admissible: Sequence[str]) -> str:
        """Opens what is closed here, else goes to a receptacle not searched yet."""
        for command in admissible:
            if command.startswith("open ") and command.removeprefix("open ") not in self._opened:
                return command
        moves = [command for command in admissible if command.startswith("go to ")]
        fresh = [command for command in moves if command.removeprefix("go to ") not in self._searched]
        if not fresh:
            self._searched.clear()
            fresh = moves
        likely = [command for command in fresh if _can_hold(command.split()[2], wanted)]
        return self._random.choice(likely or fresh or list(admissible))


def _can_hold(receptacle: str, wanted: str) -> bool:
    """Whether such things are kept there; lamps stand on open furniture, and unknown furniture may hold anything."""
    if wanted.endswith("lamp"):
        return receptacle in ("desk", "sidetable", "dresser", "shelf", "diningtable", "coffeetable")
    return receptacle not in _HOLDERS or wanted in _HOLDERS[receptacle]


def _first(admissible: Sequence[str], prefix: str) -> str | None:
    return next((command for command in admissible if command.startswith(prefix)), None)

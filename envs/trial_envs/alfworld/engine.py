"""The ALFWorld engine for one slot: Fast Downward's library holds the state, TextWorld's grammar words it.

Observations, admissible commands, scores and the end of an episode are those of the stock
``AlfredDemangler(PddlEnv(...), shuffle=False)``; what the stock engine computes again and again is computed once:

* a game's translation (kept per process for the last games played),
* the parsed grammar,
* the command and the bindings of each operator, which no action changes.

One engine plays any number of games one after the other, on one copy of the library. Engines of several threads take
turns (see :mod:`trial_envs.alfworld.library`); processes run side by side.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from trial_envs.alfworld.grammar import INTRO, Bindings, Grammar, Symbol, compile_grammar
from trial_envs.alfworld.library import (
    LIBRARIES,
    LOCK,
    applicable_operators,
    apply_operator,
    forkable,
    give_back_memory,
)
from trial_envs.alfworld.translation import Fact, Translation, translate
from trial_envs.errors import ClosedEnvError, CorruptGameError

NOTHING_HAPPENS = "Nothing happens."


@dataclass(frozen=True)
class GameText:
    """The three texts that make a game."""

    domain: str
    problem: str
    grammar: str


@dataclass(frozen=True)
class EngineState:
    """What the engine answers to a reset or a command."""

    feedback: str
    admissible_commands: tuple[str, ...]
    """Sorted, without repetitions, ``help`` included."""
    won: bool
    understood: bool
    """Whether the command was an admissible one."""


class TranslationCache:
    """The translations of the last games, shared by the engines of a process."""

    def __init__(self, capacity: int = 32) -> None:
        self._entries: OrderedDict[bytes, Translation] = OrderedDict()
        self._capacity = capacity
        self._lock = forkable(threading.Lock())

    def get(self, game: GameText) -> Translation:
        """The game's translation, made now if it is not among the last ones."""
        key = hashlib.sha256(f"{game.domain}\0{game.problem}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        translation = translate(game.domain, game.problem)
        give_back_memory()
        with self._lock:
            self._entries[key] = translation
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        return translation


TRANSLATIONS = TranslationCache()


class Facts:
    """The true facts of a game, by predicate and in ascending order."""

    def __init__(self, initial: frozenset[Fact]) -> None:
        self._by_predicate: dict[str, list[tuple[str, ...]]] = {}
        for fact in sorted(initial):
            self._by_predicate.setdefault(fact[0], []).append(fact[1:])

    def sorted_arguments(self, predicate: str) -> list[tuple[str, ...]]:
        """The argument tuples for which the predicate is true, in ascending order."""
        return self._by_predicate.get(predicate, [])

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool:
        """Whether the predicate is true of the arguments."""
        known = self._by_predicate.get(predicate, [])
        position = bisect_left(known, arguments)
        return position < len(known) and known[position] == arguments

    def apply(self, literal: str) -> None:
        """Takes up an effect as the library names it: ``Atom p(a, b)`` or ``NegatedAtom p(a, b)``.

        As in the engine, a fact that became false leaves its negation, ``not_p``, behind.
        """
        kind, rest = literal.split(" ", 1)
        predicate, arguments = rest[:-1].split("(", 1)
        fact = tuple(a for a in arguments.split(", ") if a)
        opposite = f"not_{predicate}"
        if kind == "NegatedAtom":
            predicate, opposite = opposite, predicate
        if not self.holds(predicate, fact):
            insort(self._by_predicate.setdefault(predicate, []), fact)
        if self.holds(opposite, fact):
            self._by_predicate[opposite].remove(fact)


@dataclass(frozen=True)
class _Command:
    """One operator as the player sees it."""

    text: str
    feedback: tuple[Symbol, ...]
    bindings: Bindings


def entity_names(facts: frozenset[Fact]) -> dict[str, str]:
    """Entity id -> the name that the player sees (``drawer 3``), numbered as the engine numbers them."""
    ids = sorted({argument for fact in facts for argument in fact[1:]})
    remaining = Counter(_noun(entity) for entity in ids if "_bar_" in entity)
    names = {}
    for entity in ids:
        if "_bar_" not in entity:
            names[entity] = f"{entity} "
            continue
        noun = _noun(entity)
        names[entity] = f"{noun} {remaining[noun]}"
        remaining[noun] -= 1
    return names


def _noun(entity: str) -> str:
    noun = entity.split("_bar_", 1)[0]
    return f"{noun}basin" if "basin" in entity else noun


class AlfredEngine:
    """Plays ALFWorld games on one copy of the planner's library.

    Raises:
        MissingEngineError: Fast Downward or TextWorld is not installed.
    """

    def __init__(self) -> None:
        self._library: Any = LIBRARIES.acquire()
        self._give_back = weakref.finalize(self, LIBRARIES.release, self._library)
        self._give_back.atexit = False
        self._commands: dict[bytes, _Command] = {}
        self._operators: dict[str, Any] = {}
        self.task_sentence = ""

    def load(self, game: GameText) -> None:
        """Takes up a game; :meth:`reset` starts it.

        Raises:
            CorruptGameError: one of the three texts is not the engine's.
        """
        self._check()
        self._grammar, self.task_sentence = compile_grammar(game.grammar)
        self._translation = TRANSLATIONS.get(game)
        self._names = entity_names(self._translation.facts)
        self._commands = {}

    def reset(self) -> EngineState:
        """Starts the loaded game from its first state."""
        with LOCK:
            self._check()
            self._library.load_sas(self._translation.sas)
            self._facts = Facts(self._translation.facts)
            return self._state(self._derive(INTRO, {}), understood=True)

    def step(self, command: str) -> EngineState:
        """Carries out a command; one that is not admissible changes nothing."""
        with LOCK:
            self._check()
            operator = self._operators.get(command.strip())
            if operator is None:
                return self._state(NOTHING_HAPPENS, understood=False)
            described = self._commands[operator._name]
            for literal in apply_operator(self._library, operator):
                self._facts.apply(literal)
            return self._state(self._derive(described.feedback, described.bindings), understood=True)

    def close(self) -> None:
        """Frees the game and gives the library back. May be called again, and from any thread.

        An engine that nobody closed does so when it is collected.
        """
        with LOCK:
            self._library = None
            self._commands, self._operators = {}, {}
            self._give_back()

    def _state(self, feedback: str, *, understood: bool) -> EngineState:
        """The state after a command; remembers which operator each admissible command means."""
        self._operators = {}
        for operator in applicable_operators(self._library):
            name = operator._name
            described = self._commands.get(name)
            if described is None:
                described = self._commands[name] = self._describe(name.decode("cp1252"))
            self._operators.setdefault(described.text, operator)
        won = bool(self._library.check_goal())
        return EngineState(feedback, tuple(sorted(self._operators)), won, understood)

    def _describe(self, operator: str) -> _Command:
        """The command of an operator ``name argument…``.

        Its text depends on entity names and on where receptacles stand, and neither ever changes.
        """
        name, *arguments = operator.split()
        bindings = dict(zip(self._translation.parameters[name], arguments, strict=False))
        action = self._grammar.actions.get(name)
        if action is None:
            raise CorruptGameError(f"the game's grammar has no action {name!r}, which its domain has")
        return _Command(self._derive(action.template, bindings), action.feedback, bindings)

    def _derive(self, symbols: tuple[Symbol, ...], bindings: Bindings) -> str:
        grammar: Grammar = self._grammar
        try:
            return grammar.derive(symbols, self._facts, self._names, bindings)
        except CorruptGameError:
            raise
        except (KeyError, ValueError) as error:  # a placeholder that nothing binds, or a predicate of another arity
            raise CorruptGameError(f"the game's grammar does not fit its domain: {error!r}") from error

    def _check(self) -> None:
        if self._library is None:
            raise ClosedEnvError("the engine was closed; make a new one")

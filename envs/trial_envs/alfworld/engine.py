"""The ALFWorld engine: Fast Downward's library stores the state, and TextWorld's grammar generates the texts.

Observations, admissible commands, scores and the end of an episode are the same as with the stock engine,
``AlfredDemangler(PddlEnv(...), shuffle=False)`` of ``alfworld`` and TextWorld. The stock engine repeats the following
computations; here, their results are cached:

* the translation of a game to the planner's input (cached per process for the most recently played games),
* the parsed grammar,
* the text command and the bindings of each operator (a PDDL action with its arguments), which no action changes.

One engine plays any number of games one after the other, on one copy of Fast Downward's library. A lock serialises the engines of
several threads (see :mod:`trial_envs.alfworld.library`); processes run in parallel.
"""

from __future__ import annotations

import hashlib
import weakref
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from dataclasses import dataclass

from trial_envs.alfworld.grammar import INTRO, Bindings, Symbol, compile_grammar
from trial_envs.alfworld.library import (
    LIBRARIES,
    LOCK,
    Library,
    Operator,
    applicable_operators,
    apply_operator,
    trim_heap,
)
from trial_envs.alfworld.translation import Fact, Translation, translate
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import ClosedEnvError, CorruptGameError

NOTHING_HAPPENS = "Nothing happens."


@dataclass(frozen=True)
class GameText:
    """The three texts that define a game: PDDL domain, PDDL problem and text grammar."""

    domain: str
    problem: str
    grammar: str


@dataclass(frozen=True)
class EngineState:
    """Result of a reset or a command."""

    feedback: str
    admissible_commands: tuple[str, ...]
    """The admissible commands, sorted and without duplicates; ``help`` is one of them."""
    won: bool
    understood: bool
    """True if the command was admissible."""


class TranslationCache:
    """Cache of the planner inputs of the most recently played games, shared by all engines of a process."""

    def __init__(self, capacity: int = 32) -> None:
        self._entries: OrderedDict[bytes, Translation] = OrderedDict()
        self._capacity = capacity
        self._lock = fork_safe_lock()

    def get(self, game: GameText) -> Translation:
        """Return the game's translation to planner input; compute it if it is not cached."""
        key = hashlib.sha256(f"{game.domain}\0{game.problem}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        translation = translate(game.domain, game.problem)
        trim_heap()
        with self._lock:
            self._entries[key] = translation
            while len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        return translation


TRANSLATIONS = TranslationCache()


class Facts:
    """The facts that are true in the current state of a game, by predicate and in ascending order."""

    def __init__(self, initial: frozenset[Fact]) -> None:
        self._by_predicate: dict[str, list[tuple[str, ...]]] = {}
        for fact in sorted(initial):
            self._by_predicate.setdefault(fact[0], []).append(fact[1:])

    def sorted_arguments(self, predicate: str) -> list[tuple[str, ...]]:
        """Return the argument tuples of the predicate's true facts, in ascending order."""
        return self._by_predicate.get(predicate, [])

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool:
        """Return whether the predicate is true for the arguments."""
        known = self._by_predicate.get(predicate, [])
        position = bisect_left(known, arguments)
        return position < len(known) and known[position] == arguments

    def apply(self, literal: str) -> None:
        """Apply an operator's effect in Fast Downward's notation: ``Atom p(a, b)`` or ``NegatedAtom p(a, b)``.

        As in the ``alfworld`` package, a fact ``p`` that becomes false is replaced by the fact ``not_p``.
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
    """The text command of an operator, and the symbols and bindings from which its feedback text is derived."""

    text: str
    feedback: tuple[Symbol, ...]
    bindings: Bindings


def entity_names(facts: frozenset[Fact]) -> dict[str, str]:
    """Return a dict from entity ids to names such as ``drawer 3``, numbered as in the ``alfworld`` package."""
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
    """Plays ALFWorld games; a copy of the library of Fast Downward, a planner, stores the state.

    Raises:
        MissingEngineError: Fast Downward or TextWorld is not installed.
    """

    def __init__(self) -> None:
        library = LIBRARIES.acquire()
        self._library: Library | None = library
        self._release = weakref.finalize(self, LIBRARIES.release, library)
        self._release.atexit = False
        self._commands: dict[bytes, _Command] = {}
        self._operators: dict[str, Operator] = {}
        self.task_sentence = ""

    def load(self, game: GameText) -> None:
        """Load a game; :meth:`reset` starts it.

        Raises:
            CorruptGameError: the domain, the problem or the grammar cannot be read.
        """
        self._open_library()
        self._grammar, self.task_sentence = compile_grammar(game.grammar)
        self._translation = TRANSLATIONS.get(game)
        self._names = entity_names(self._translation.facts)
        self._commands = {}
        self._text = game
        self._planning_sas: bytes | None = None

    def reset(self) -> EngineState:
        """Start the loaded game from its first state."""
        with LOCK:
            library = self._open_library()
            library.load_sas(self._translation.sas)
            self._loaded_for_planning = False
            self._facts = Facts(self._translation.facts)
            return self._state(library, self._derive(INTRO, {}), understood=True)

    def step(self, command: str) -> EngineState:
        """Carry out a command; a command that is not admissible changes nothing."""
        with LOCK:
            library = self._open_library()
            operator = self._operators.get(command.strip())
            if operator is None:
                return self._state(library, NOTHING_HAPPENS, understood=False)
            described = self._commands[operator._name]
            for literal in apply_operator(library, operator):
                self._facts.apply(literal)
            return self._state(library, self._derive(described.feedback, described.bindings), understood=True)

    def commands_to_win(self) -> int | None:
        """Return the length of a plan that wins from the current state; 0 if the game is won, ``None`` if no plan is found.

        The planner is satisficing: its plan may be longer than the shortest plan.
        """
        with LOCK:
            library = self._open_library()
            if library.check_goal():
                return 0
            if self._planning_sas is None:
                self._planning_sas = translate(self._text.domain, self._text.problem, planning=True).sas
            if not self._loaded_for_planning:
                library.load_sas_replan(self._planning_sas)
                self._loaded_for_planning = True
            return library.get_last_plan_length() if library.replan(False) else None

    def close(self) -> None:
        """Free the loaded game and return this engine's copy of Fast Downward to the pool of copies.

        Any thread may call this method, also repeatedly. An engine that was not closed returns its copy when it is
        garbage-collected.
        """
        with LOCK:
            self._library = None
            self._commands, self._operators = {}, {}
            self._release()

    def _state(self, library: Library, feedback: str, *, understood: bool) -> EngineState:
        """Return the state after a command; store the operator of each admissible command."""
        self._operators = {}
        for operator in applicable_operators(library):
            name = operator._name
            described = self._commands.get(name)
            if described is None:
                described = self._commands[name] = self._describe(name.decode("cp1252"))
            self._operators.setdefault(described.text, operator)
        return EngineState(feedback, tuple(sorted(self._operators)), library.check_goal(), understood)

    def _describe(self, operator: str) -> _Command:
        """Return the text command of an operator, given as the PDDL action's name and arguments, separated by spaces.

        The command depends only on the names of entities and the locations of receptacles, which no action changes.
        """
        name, *arguments = operator.split()
        bindings = dict(zip(self._translation.parameters[name], arguments, strict=False))
        action = self._grammar.actions.get(name)
        if action is None:
            raise CorruptGameError(f"The game's grammar lacks the action {name!r} of its domain.")
        return _Command(self._derive(action.template, bindings), action.feedback, bindings)

    def _derive(self, symbols: tuple[Symbol, ...], bindings: Bindings) -> str:
        try:
            return self._grammar.derive(symbols, self._facts, self._names, bindings)
        except CorruptGameError:
            raise
        except (KeyError, ValueError) as error:  # A grammar placeholder is unbound, or a predicate's arity is wrong.
            raise CorruptGameError(f"The game's grammar does not match its domain: {error!r}") from error

    def _open_library(self) -> Library:
        if self._library is None:
            raise ClosedEnvError("The engine was closed; make a new one.")
        return self._library

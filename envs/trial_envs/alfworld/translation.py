"""Translates PDDL to the planner's input (SAS), faster than ``fast_downward.pddl2sas`` and with the same result.

The function ``pddl2sas`` parses and normalises the domain again for every game, replaces ``sys.stdout`` to capture its progress
messages, overwrites ``sys.argv``, and spends half of its time in the garbage collector. Here, a domain is prepared once per
process, the translator's modules do not print, ``sys.argv`` is restored, and garbage collection is off during a translation.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import IO, Any

from trial_envs.core.extras import install_command
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import CorruptGameError, MissingEngineError

_LOCK = fork_safe_lock()
"""Lock that is held during a translation, because the translator has module-level counters and options."""

_OPTIONS = {
    "filter_unimportant_vars": False,
    "filter_unreachable_facts": False,
    "use_partial_encoding": False,
    "skip_variable_reordering": True,
    "add_implied_preconditions": False,
    "invariant_generation_max_candidates": 0,
}
"""Options of ``pddl2sas`` for playing, which keep all actions and facts of the game."""

_PLANNING_OPTIONS = {
    "filter_unimportant_vars": True,
    "filter_unreachable_facts": True,
    "use_partial_encoding": True,
    "skip_variable_reordering": False,
    "add_implied_preconditions": True,
    "invariant_generation_max_candidates": 0,
}
"""Options of ``pddl2sas`` for planning, which remove everything that no plan needs."""

_UNREADABLE = re.compile(r"[^\t\n\r -~]")
"""A character at which Fast Downward would stop reading and end the process."""

Fact = tuple[str, ...]
"""A predicate's name and its arguments, all in lower case."""


@dataclass(frozen=True)
class Translation:
    """A game translated to SAS, the format that Fast Downward loads."""

    sas: bytes
    facts: frozenset[Fact]
    """The facts of the initial state."""
    parameters: dict[str, tuple[str, ...]]
    """Action -> names of its parameters, without the question mark."""


@dataclass(frozen=True)
class _Domain:
    """A parsed and normalised PDDL domain; the fields hold objects of Fast Downward's translator, which has no type hints."""

    name: str
    types: list[Any]
    type_dict: dict[str, Any]
    constants: list[Any]
    predicates: list[Any]
    predicate_dict: dict[str, Any]
    functions: list[Any]
    actions: list[Any]
    axioms: list[Any]


def translate(domain: str, problem: str, *, planning: bool = False) -> Translation:
    """Translate one game.

    Args:
        domain: PDDL of the domain.
        problem: PDDL of the problem.
        planning: whether to omit the parts of the game that no plan needs; false for playing.

    Raises:
        CorruptGameError: the translator does not accept the domain or the problem.
        MissingEngineError: ``fast-downward-textworld`` is not installed.
    """
    if match := _UNREADABLE.search(domain + problem):
        raise CorruptGameError(f"The game's PDDL has the character {match[0]!r}, expected printable ASCII.")
    with _LOCK, _garbage_collection_off():
        modules = _translator()
        for name, value in (_PLANNING_OPTIONS if planning else _OPTIONS).items():
            setattr(modules["options"], name, value)
        try:
            task = _task(modules, domain, problem)
            sas_task = modules["translate"].pddl_to_sas(task)
        except (Exception, SystemExit) as error:  # Invalid PDDL causes AssertionError, StopIteration or SystemExit.
            raise CorruptGameError(f"The PDDL problem cannot be translated: {type(error).__name__}: {error}") from error
        stream = io.StringIO()
        sas_task.output(stream)
        facts = frozenset(_facts(task.init))
    parameters = {action.name: tuple(p.name.strip("?") for p in action.parameters) for action in task.actions}
    return Translation(stream.getvalue().encode(), facts, parameters)


def _facts(init: list[Any]) -> Iterator[Fact]:
    for atom in init:
        # ``init`` may also contain assignments of costs, which have no predicate.
        predicate = getattr(atom, "predicate", "=")
        if predicate != "=":
            yield (predicate, *atom.args)


def _task(modules: dict[str, ModuleType], domain: str, problem: str) -> Any:
    """Return the parsed and normalised ``pddl.Task``; its actions are shared by all games of one domain."""
    prepared = _prepared_domain(domain)
    parser = modules["parsing_functions"]
    tree = modules["lisp_parser"].parse_nested_list(problem.split("\n"))
    _, domain_name, requirements, objects, init, goal, metric = parser.parse_task_pddl(
        tree, prepared.type_dict, prepared.predicate_dict
    )
    if domain_name != prepared.name:
        raise CorruptGameError(
            f"The problem has the domain {domain_name!r}, expected the game's domain {prepared.name!r}."
        )
    pddl = modules["pddl"]
    objects = prepared.constants + objects
    parser.check_for_duplicates([o.name for o in objects], "error: duplicate object %r", "in :constants and :objects")
    init = init + [pddl.Atom("=", (o.name, o.name)) for o in objects]
    task = pddl.Task(
        domain_name,
        "game",
        requirements,
        prepared.types,
        objects,
        list(prepared.predicates),
        prepared.functions,
        init,
        goal,
        [],
        list(prepared.axioms),
        metric,
    )
    task.axiom_counter = len(prepared.axioms)
    modules["normalize"].normalize(task)
    task.actions = list(prepared.actions)
    return task


@lru_cache(maxsize=4)
def _prepared_domain(domain: str) -> _Domain:
    """Return a parsed domain, normalised with a trivial goal, because normalisation needs a goal."""
    modules = _translator()
    pddl = modules["pddl"]
    tree = modules["lisp_parser"].parse_nested_list(domain.split("\n"))
    name, requirements, types, type_dict, constants, predicates, predicate_dict, functions, actions, axioms = modules[
        "parsing_functions"
    ].parse_domain_pddl(tree)
    goal = pddl.Atom("=", ("domain", "domain"))
    task = pddl.Task(
        name, "domain", requirements, types, [], list(predicates), functions, [], goal, actions, axioms, False
    )
    modules["normalize"].normalize(task)
    return _Domain(
        name, types, type_dict, constants, task.predicates, predicate_dict, functions, task.actions, task.axioms
    )


@lru_cache(maxsize=1)
def _translator() -> dict[str, ModuleType]:
    """Return the translator's modules; ``sys.argv`` is replaced, because the module ``options`` parses it on import."""
    package = "fast_downward.translate"
    parsers = ("pddl_parser.lisp_parser", "pddl_parser.parsing_functions")
    names = ("options", "normalize", "translate", "pddl", *parsers)
    arguments = sys.argv
    sys.argv = ["translate.py", "domain", "task"]
    try:
        modules = {name.rsplit(".", 1)[-1]: importlib.import_module(f"{package}.{name}") for name in names}
    except ImportError as error:
        raise MissingEngineError(
            f"The package fast-downward-textworld is not installed: {install_command('alfworld')}"
        ) from error
    finally:
        sys.argv = arguments
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            module.print = _print_to_files_only  # type: ignore[attr-defined]
    importlib.import_module(f"{package}.timers").timing = _untimed  # type: ignore[attr-defined]
    return modules


def _print_to_files_only(*values: object, file: IO[str] | None = None, end: str = "\n") -> None:
    """Print only if ``file`` is given; as ``print`` of the translator's modules, this suppresses their progress messages."""
    if file is not None:
        file.write(" ".join(map(str, values)) + end)


@contextlib.contextmanager
def _untimed(text: str, block: bool = False) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Pause garbage collection while the translator allocates many small objects that all stay in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

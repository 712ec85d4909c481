"""The engine's text grammar, read by TextWorld's own parser and derived without its costs.

TextWorld parses every start symbol and every query again on each use and copies the whole context at each step of a
derivation, which takes 60 ms a turn. Here rules are compiled once into small tuples; a derivation then only looks up
facts. Expressions inside braces are read as attribute accesses, joined by ``+`` or ``or``, and never evaluated as code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from trial_envs.errors import CorruptGameError, MissingEngineError

Bindings = dict[str, str]
"""Placeholder name -> entity id."""

Symbol = tuple[Any, ...]
"""``("text", s)``, ``("rule", name)``, ``("eval", f)``, ``("query", symbol, literals)`` or ``("list", symbol)``."""

Literals = tuple[tuple[str, tuple[str, ...]], ...]
"""Predicates and the names of their placeholders."""

Rules = Mapping[str, list[tuple[Literals, tuple[Symbol, ...]]]]
"""Name of a rule -> its alternatives: a condition and what the name then stands for."""

_TASK_SENTENCE = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')
_MAX_SYMBOLS = 1_000_000
_MARKUP = set("#{}[]\\")


class FactBase(Protocol):
    """What a derivation asks of the state of the game."""

    def sorted_arguments(self, predicate: str) -> list[tuple[str, ...]]:
        """The argument tuples for which the predicate is true, in ascending order."""

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool:
        """Whether the predicate is true of the arguments."""


@dataclass(frozen=True)
class CompiledAction:
    """The text side of one PDDL action."""

    template: tuple[Symbol, ...]
    feedback: tuple[Symbol, ...]


class Grammar:
    """Compiled rules; derives texts from facts and entity names."""

    def __init__(
        self, rules: Mapping[str, list[tuple[Literals, tuple[Symbol, ...]]]], actions: Mapping[str, CompiledAction]
    ):
        self.rules = rules
        self.actions = actions

    def derive(self, symbols: tuple[Symbol, ...], facts: FactBase, names: Mapping[str, str], bindings: Bindings) -> str:
        """The text that the symbols stand for.

        Args:
            symbols: what to derive: a template, a feedback, or :data:`INTRO`.
            facts: the state of the game.
            names: entity id -> the name that the player sees.
            bindings: entity ids of the placeholders that are known already.
        """
        derived: list[str] = []
        stack = [(symbol, bindings) for symbol in reversed(symbols)]
        for _ in range(_MAX_SYMBOLS):
            if not stack:
                return "".join(derived)
            symbol, known = stack.pop()
            kind = symbol[0]
            if kind == "text":
                derived.append(symbol[1])
            elif kind == "eval":
                derived.append(symbol[1](names, known))
            elif kind == "rule":
                stack.extend((s, known) for s in reversed(self._choose(symbol[1], facts, known)))
            elif kind == "query":
                stack.extend(reversed([(symbol[1], found) for found in solutions(symbol[2], facts, known)]))
            else:
                stack.extend(reversed(_as_list(symbol[1], facts, known)))
        raise CorruptGameError(f"the game's grammar derives more than {_MAX_SYMBOLS} symbols; a rule calls itself")

    def _choose(self, rule: str, facts: FactBase, bindings: Bindings) -> tuple[Symbol, ...]:
        """The right-hand side of the first alternative whose condition holds."""
        for condition, symbols in self.rules.get(rule, ()):
            if not condition or next(solutions(condition, facts, bindings), None) is not None:
                return symbols
        raise CorruptGameError(f"the game's grammar has no applicable rule for #{rule}#")


INTRO: tuple[Symbol, ...] = (("rule", "intro"),)


def _as_list(symbol: Symbol, facts: FactBase, bindings: Bindings) -> list[tuple[Symbol, Bindings]]:
    """One item per solution, with the grammar's separators in between."""
    if symbol[0] != "query":
        return [(symbol, bindings)]
    items = [(symbol[1], found) for found in solutions(symbol[2], facts, bindings)]
    if not items:
        return [(("rule", "list_empty"), bindings)]
    if len(items) == 1:
        return items
    listed = [items[0]]
    for item in items[1:-1]:
        listed += [(("rule", "list_separator"), bindings), item]
    return [*listed, (("rule", "list_last_separator"), bindings), items[-1]]


def solutions(literals: Literals, facts: FactBase, bindings: Bindings) -> Iterator[Bindings]:
    """Every extension of the bindings that makes all literals true, in the engine's order.

    Two placeholders never stand for the same entity.
    """
    if not literals:
        yield dict(bindings)
        return
    (predicate, placeholders), rest = literals[0], literals[1:]
    if all(p in bindings for p in placeholders):
        if facts.holds(predicate, tuple(bindings[p] for p in placeholders)):
            yield from solutions(rest, facts, bindings)
        return
    for arguments in facts.sorted_arguments(predicate):
        extended = dict(bindings)
        used = set(bindings.values())
        for placeholder, entity in zip(placeholders, arguments, strict=True):
            bound = extended.get(placeholder)
            if bound is None:
                if entity in used:
                    break
                extended[placeholder] = entity
                used.add(entity)
            elif bound != entity:
                break
        else:
            yield from solutions(rest, facts, extended)


def compile_grammar(text: str) -> tuple[Grammar, str]:
    """Compiles a game's grammar and finds its task sentence.

    All games share one grammar but for that sentence, so the parsed rules are kept per process.

    Returns:
        The grammar, and the sentence that ``#task#`` stands for.

    Raises:
        CorruptGameError: the text is no grammar of the engine.
        MissingEngineError: TextWorld is not installed.
    """
    found = _TASK_SENTENCE.search(text)
    if found is None:
        raise CorruptGameError("the game's grammar has no rule 'task'")
    sentence = json.loads(found.group(2))
    if _MARKUP & set(sentence):
        grammar = _compile(text)
        return grammar, sentence
    shared = _compile(text[: found.start(2)] + '"TASK"' + text[found.end(2) :])
    return Grammar({**shared.rules, "task": [((), (("text", sentence),))]}, shared.actions), sentence


@lru_cache(maxsize=8)
def _compile(text: str) -> Grammar:
    try:
        from textworld.envs.pddl.logic import GameLogic
    except ImportError as error:
        raise MissingEngineError("ALFWorld needs TextWorld: pip install 'trial-ray[alfworld]'") from error
    try:
        logic = GameLogic(domain="", grammar=text)
        rules = {
            name: [(_literals(rule.condition), _symbols(rule.rhs)) for rule in alternatives]
            for name, alternatives in logic.grammar._rules.items()
        }
        actions = {
            name: CompiledAction(_parse_symbols(action.template), _parse_symbols(action.feedback_rule))
            for name, action in logic.actions.items()
        }
    except CorruptGameError:
        raise
    except Exception as error:  # TatSu's parse errors have no common public base
        raise CorruptGameError(f"the game's grammar cannot be parsed: {error}") from error
    return Grammar(rules, actions)


def _parse_symbols(text: str) -> tuple[Symbol, ...]:
    from textworld.envs.pddl import textgen

    return _symbols(textgen._parse_and_convert(text, rule_name="symbols"))


def _symbols(parsed: list[Any]) -> tuple[Symbol, ...]:
    return tuple(_symbol(symbol) for symbol in parsed)


def _symbol(parsed: Any) -> Symbol:
    kind = type(parsed).__name__
    if kind == "TerminalSymbol":
        return ("text", str(parsed.symbol))
    if kind == "NonterminalSymbol":
        return ("rule", str(parsed.symbol))
    if kind == "EvalSymbol":
        return ("eval", _expression(parsed.expression))
    if kind == "ConditionalSymbol":
        return ("query", _symbol(parsed.expression), _literals(parsed.given))
    return ("list", _symbol(parsed.symbol))


def _literals(query: str) -> Literals:
    """Reads ``p(x:type) & q(x:type, y:type)``; types are dropped, because a predicate's arguments have only one."""
    from textworld.logic import Rule

    if not query:
        return ()
    rule = Rule.parse_conjunctive_query(query)
    return tuple((p.name, tuple(ph.name for ph in p.parameters)) for p in rule.preconditions)


Expression = Callable[[Mapping[str, str], Bindings], str]


def _expression(source: str) -> Expression:
    """Turns ``o.indefinite + ' ' + o.name`` into a function of the entity names and the bindings."""
    try:
        parsed = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise CorruptGameError(f"the game's grammar holds the expression {source!r}, which cannot be read") from error
    return _build(parsed.body, source)


def _build(node: ast.expr, source: str) -> Expression:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
        return lambda names, bindings: text
    if isinstance(node, ast.Name):
        return _attribute(node.id, "name")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return _attribute(node.value.id, node.attr)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _build(node.left, source), _build(node.right, source)
        return lambda names, bindings: left(names, bindings) + right(names, bindings)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        parts = [_build(value, source) for value in node.values]
        return lambda names, bindings: next((s for s in (p(names, bindings) for p in parts) if s), "")
    raise CorruptGameError(
        f"the game's grammar holds the expression {source!r}; only names, '+' and 'or' are understood"
    )


def _attribute(placeholder: str, attribute: str) -> Expression:
    fixed = {"indefinite": "a", "definite": "the"}.get(attribute)
    if fixed is not None:
        return lambda names, bindings: fixed
    if attribute == "name":
        return lambda names, bindings: names[bindings[placeholder]]
    if attribute == "id":
        return lambda names, bindings: bindings[placeholder]
    raise CorruptGameError(f"the game's grammar asks for the unknown attribute {attribute!r} of an entity")

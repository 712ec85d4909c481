"""The text grammar of ALFWorld games: TextWorld parses it, and a faster implementation derives the texts.

TextWorld parses every start symbol and every query again on each use and copies the whole context at each step of a
derivation, which takes 60 ms per turn. Here, the rules are compiled once into tuples, and a derivation only looks up
facts. Expressions in braces are parsed as attribute accesses, joined by ``+`` or ``or``, and never evaluated as code.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from trial_envs.core.extras import install_command
from trial_envs.core.forks import fork_safe_lock
from trial_envs.errors import CorruptGameError, MissingEngineError

Bindings = dict[str, str]
"""Placeholder name -> entity id."""

Expression = Callable[[Mapping[str, str], Bindings], str]
"""A compiled expression: a function of the entity names and the bindings."""

Literals = tuple[tuple[str, tuple[str, ...]], ...]
"""Conjunction of predicates, each with the names of its placeholders."""

Symbol = (
    tuple[Literal["text", "rule"], str]
    | tuple[Literal["eval"], Expression]
    | tuple[Literal["query"], "Symbol", Literals]
    | tuple[Literal["list"], "Symbol"]
)
"""A symbol of a rule: a text, the name of a rule, an expression, a query (a symbol that is derived once for each solution of
the query), or a list (a query whose derived texts are separated, for example by commas)."""

Rules = Mapping[str, list[tuple[Literals, tuple[Symbol, ...]]]]
"""Name of a rule -> its alternatives, each a condition and the symbols that replace the rule if the condition is true."""

_TASK_SENTENCE = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')
_MAX_SYMBOLS = 1_000_000
_PARSING = fork_safe_lock()
"""Lock that is held while a grammar is parsed, because all threads share TextWorld's parsers."""
_MARKUP = set("#{}[]\\")


class FactBase(Protocol):
    """The facts that are true in the current state of a game, with the look-ups that :meth:`Grammar.derive` needs."""

    def sorted_arguments(self, predicate: str) -> list[tuple[str, ...]]:
        """Return the argument tuples of the predicate's true facts, in ascending order."""

    def holds(self, predicate: str, arguments: tuple[str, ...]) -> bool:
        """Return whether the predicate is true for the arguments."""


@dataclass(frozen=True)
class CompiledAction:
    """The symbols of a PDDL action: ``template`` derives its text command, ``feedback`` the observation after the command."""

    template: tuple[Symbol, ...]
    feedback: tuple[Symbol, ...]


class Grammar:
    """Compiled rules; derives texts from facts and entity names."""

    def __init__(self, rules: Rules, actions: Mapping[str, CompiledAction]) -> None:
        self.rules = rules
        self.actions = actions

    def derive(self, symbols: tuple[Symbol, ...], facts: FactBase, names: Mapping[str, str], bindings: Bindings) -> str:
        """Return the text that the grammar derives from the symbols.

        Args:
            symbols: the symbols to derive: those of a :class:`CompiledAction`, or :data:`INTRO`.
            facts: the state of the game.
            names: entity id -> name in the texts.
            bindings: entity ids of the bound placeholders.

        Raises:
            CorruptGameError: no rule applies, or the rules recurse endlessly.
        """
        derived: list[str] = []
        stack = [(symbol, bindings) for symbol in reversed(symbols)]
        for _ in range(_MAX_SYMBOLS):
            if not stack:
                return "".join(derived)
            symbol, bound = stack.pop()
            if symbol[0] == "text":
                derived.append(symbol[1])
            elif symbol[0] == "eval":
                derived.append(symbol[1](names, bound))
            elif symbol[0] == "rule":
                stack.extend((s, bound) for s in reversed(self._choose(symbol[1], facts, bound)))
            elif symbol[0] == "query":
                stack.extend(reversed([(symbol[1], solution) for solution in solutions(symbol[2], facts, bound)]))
            else:
                stack.extend(reversed(_as_list(symbol[1], facts, bound)))
        raise CorruptGameError(f"The game's grammar derives more than {_MAX_SYMBOLS} symbols; a rule is recursive.")

    def _choose(self, rule: str, facts: FactBase, bindings: Bindings) -> tuple[Symbol, ...]:
        """Return the right-hand side of the rule's first alternative whose condition holds."""
        for condition, symbols in self.rules.get(rule, ()):
            if not condition or next(solutions(condition, facts, bindings), None) is not None:
                return symbols
        raise CorruptGameError(f"The game's grammar has no applicable rule for #{rule}#.")


INTRO: tuple[Symbol, ...] = (("rule", "intro"),)


def _as_list(symbol: Symbol, facts: FactBase, bindings: Bindings) -> list[tuple[Symbol, Bindings]]:
    """Return the symbol once for each solution of its query, with the grammar's separators in between."""
    if symbol[0] != "query":
        return [(symbol, bindings)]
    items = [(symbol[1], solution) for solution in solutions(symbol[2], facts, bindings)]
    if not items:
        return [(("rule", "list_empty"), bindings)]
    if len(items) == 1:
        return items
    listed = [items[0]]
    for item in items[1:-1]:
        listed += [(("rule", "list_separator"), bindings), item]
    return [*listed, (("rule", "list_last_separator"), bindings), items[-1]]


def solutions(literals: Literals, facts: FactBase, bindings: Bindings) -> Iterator[Bindings]:
    """Yield every extension of the bindings that makes all literals true, in the same order as TextWorld.

    Two placeholders are never bound to the same entity.
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
    """Compile a game's grammar and find the task's instruction in it.

    The grammars of all games differ only in the instruction, so the parsed rules are cached per process.

    Returns:
        The grammar, and the instruction, which is the text of the rule ``task``.

    Raises:
        CorruptGameError: the text is not a grammar of an ALFWorld game.
        MissingEngineError: TextWorld is not installed.
    """
    match = _TASK_SENTENCE.search(text)
    if match is None:
        raise CorruptGameError("The game's grammar has no rule 'task'.")
    sentence = json.loads(match.group(2))
    if _MARKUP & set(sentence):
        grammar = _compile(text)
        return grammar, sentence
    shared = _compile(text[: match.start(2)] + '"TASK"' + text[match.end(2) :])
    return Grammar({**shared.rules, "task": [((), (("text", sentence),))]}, shared.actions), sentence


def _compile(text: str) -> Grammar:
    with _PARSING:
        return _parse(text)


@lru_cache(maxsize=8)
def _parse(text: str) -> Grammar:
    try:
        from textworld.envs.pddl.logic import GameLogic
    except ImportError as error:
        raise MissingEngineError(f"TextWorld is not installed: {install_command('alfworld')}") from error
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
    except Exception as error:  # The errors of TatSu, TextWorld's parser, have no common public base class.
        raise CorruptGameError(f"The game's grammar cannot be parsed: {error}") from error
    return Grammar(rules, actions)


def _parse_symbols(text: str) -> tuple[Symbol, ...]:
    from textworld.envs.pddl import textgen

    return _symbols(textgen._parse_and_convert(text, rule_name="symbols"))


def _symbols(parsed: list[Any]) -> tuple[Symbol, ...]:
    return tuple(_symbol(symbol) for symbol in parsed)


def _symbol(parsed: Any) -> Symbol:
    """Convert a symbol of ``textworld.envs.pddl.textgen``, which has no type annotations, to a :data:`Symbol`."""
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
    """Parse ``p(x:type) & q(x:type, y:type)``; the types are dropped, because each predicate fixes them."""
    from textworld.logic import Rule

    if not query:
        return ()
    rule = Rule.parse_conjunctive_query(query)
    return tuple((p.name, tuple(ph.name for ph in p.parameters)) for p in rule.preconditions)


def _expression(source: str) -> Expression:
    """Compile an expression such as ``o.indefinite + ' ' + o.name``."""
    try:
        parsed = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise CorruptGameError(f"The expression {source!r} of the game's grammar cannot be parsed.") from error
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
        f"The game's grammar has the expression {source!r}; expected only names, texts, '+' and 'or'."
    )


def _attribute(placeholder: str, attribute: str) -> Expression:
    fixed = {"indefinite": "a", "definite": "the"}.get(attribute)
    if fixed is not None:
        return lambda names, bindings: fixed
    if attribute == "name":
        return lambda names, bindings: names[bindings[placeholder]]
    if attribute == "id":
        return lambda names, bindings: bindings[placeholder]
    raise CorruptGameError(
        f"The game's grammar uses the attribute {attribute!r}, expected name, id, definite or indefinite."
    )

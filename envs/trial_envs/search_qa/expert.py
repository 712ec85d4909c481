"""Scripted policies for the questions of generated worlds, which use only the texts that a policy reads."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from trial_envs.search_qa.relations import PRONOUNS, RELATIONS, Relation

MAX_SEARCHES = 4
"""Number of searches after which an expert answers in any case; the environment's default limit."""
_PASSAGE = re.compile(r"\[\d+\] (.+?): (.*)")
_SENTENCE_END = re.compile(r"(?<=\.) ")


class ParsedQuestion(NamedTuple):
    """The parts of a question.

    Attributes:
        names: the names in the question: one, or two that are compared.
        relations: the relations to follow from a name, the first one first.
        direction: ``earlier`` or ``later`` if two names are compared, else empty.
    """

    names: tuple[str, ...]
    relations: tuple[Relation, ...]
    direction: str = ""


def parse_question(text: str) -> ParsedQuestion:
    """Return the parts of a question.

    Raises:
        ValueError: the question has none of the forms in the generated worlds.
    """
    for relation, (direction, *names) in _readings(text, "comparisons"):
        return ParsedQuestion(tuple(names), (relation,), direction)
    relations: tuple[Relation, ...] = ()
    described = text
    while reading := next(_readings(described, "phrases" if relations else "questions"), None):
        relations = (reading[0], *relations)
        (described,) = reading[1]
    if not relations:
        raise ValueError(f"{text!r:.200} is not a question of a generated world; the experts can answer no other one.")
    return ParsedQuestion((described,), relations)


def read_value(relation: Relation, name: str, observations: Iterable[str]) -> str | None:
    """Return the value of a relation that the passages of some observation state for a name, or ``None``."""
    for title, text in _PASSAGE.findall("\n".join(observations)):
        for sentence in _SENTENCE_END.split(text):
            for match in (_pattern(form).fullmatch(sentence) for form in relation.sentences):
                if match and (match["s"] == name or (title == name and match["s"] in PRONOUNS)):
                    return match["o"]
    return None


def _readings(text: str, forms: str) -> Iterator[tuple[Relation, Sequence[str]]]:
    """Yield the relations with a form of a kind that a text has, and the arguments in the text."""
    for relation in RELATIONS:
        for form in getattr(relation, forms):
            if match := _pattern(form).fullmatch(text):
                yield relation, match.groups()


@cache
def _pattern(form: str) -> re.Pattern[str]:
    """Return the pattern of texts of a form; ``{s}`` and ``{o}`` are groups of these names."""
    pattern = re.escape(form).replace(r"\{s\}", "(?P<s>.+)").replace(r"\{o\}", "(?P<o>.+)")
    return re.compile(pattern.replace(r"\{\}", "(.+)"))


class SearchExpert:
    """Searches for the names in the question, follows its relations from passage to passage, and answers."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode; ``task`` is ``info["task"]``.

        Raises:
            ValueError: see :func:`parse_question`.
        """
        self._question = parse_question(task)
        self._random = random.Random(seed)
        self._observations: list[str] = []
        self._actions: list[str] = []

    def act(self, observation: str, admissible: Sequence[str]) -> str:
        """Return the next action."""
        options = self.options(observation, admissible)
        self._observations.append(observation)
        self._actions.append(self._random.choice(options))
        return self._actions[-1]

    def options(self, observation: str, admissible: Sequence[str]) -> list[str]:
        """Return the actions that :meth:`act` draws from, at this turn."""
        observations = [*self._observations, observation]
        if self._question.direction:
            return self._compare(observations)
        (name,) = self._question.names
        for relation in self._question.relations:
            value = read_value(relation, name, observations)
            if value is None:
                return [self._search(name, relation) if len(self._actions) < MAX_SEARCHES else f"answer[{name}]"]
            name = value
        return [f"answer[{name}]"]

    def carried_out(self, action: str) -> None:
        """Record that ``action`` was carried out instead of the action returned by :meth:`act`."""
        self._actions[-1] = action

    def _search(self, name: str, relation: Relation) -> str:
        """Return a search for a name; if it was searched for before, with the words of the relation."""
        search = f"search[{name}]"
        return f"search[{relation.sentences[0].format(s=name, o='')}]" if search in self._actions else search

    def _compare(self, observations: Sequence[str]) -> list[str]:
        """Return the searches for years that the observations do not state, else the answer."""
        (relation,), names = self._question.relations, self._question.names
        years = {name: year for name in names if (year := read_value(relation, name, observations))}
        if len(years) < len(names):
            return [self._search(name, relation) for name in names if name not in years]
        choose = min if self._question.direction == "earlier" else max
        return [f"answer[{choose(years, key=lambda name: int(years[name]))}]"]


class ForgetfulExpert(SearchExpert):
    """An expert that knows only the question, its last action, and the observations before and after it.

    It does not remember how many relations it has followed. If the passages state several relations of the question for the name
    that it searched for, it follows any of them.
    """

    def options(self, observation: str, admissible: Sequence[str]) -> list[str]:
        """Return the actions that :meth:`act` draws from, at this turn."""
        if self._question.direction:
            return self._compare([*self._observations[-1:], observation])
        last = self._actions[-1].removeprefix("search[").removesuffix("]") if self._actions else ""
        *inner, outermost = self._question.relations
        follow = [f"search[{value}]" for each in inner if (value := read_value(each, last, [observation]))]
        answer = read_value(outermost, last, [observation])
        return [*follow, *([f"answer[{answer}]"] if answer else [])] or [f"search[{self._question.names[0]}]"]

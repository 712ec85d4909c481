"""Scripted policies for the questions about generated worlds, which use only the texts that a trained policy also reads."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from trial_envs.search_qa.relations import PRONOUNS, RELATIONS, Relation

_PASSAGE = re.compile(r"\[\d+\] (.+?): (.*)")
_SENTENCE_END = re.compile(r"(?<=\.) ")


class ParsedQuestion(NamedTuple):
    """The parts of a question about a generated world.

    Attributes:
        names: the names in the question: one, or two that are compared.
        relations: the relations to follow from a name, in order.
        direction: ``earlier`` or ``later`` if two names are compared, else empty.
    """

    names: tuple[str, ...]
    relations: tuple[Relation, ...]
    direction: str = ""


def parse_question(text: str) -> ParsedQuestion:
    """Return the parts of a question.

    Raises:
        ValueError: the text is not a question about a generated world.
    """
    for relation, match in _matches(text, "comparisons"):
        return ParsedQuestion((match[2], match[3]), (relation,), match[1])
    relations: tuple[Relation, ...] = ()
    described = text
    while reading := next(_matches(described, "phrases" if relations else "questions"), None):
        relations = (reading[0], *relations)
        described = reading[1][1]
    if not relations:
        raise ValueError(f"{text!r:.200} is not a question of a generated world; the experts can answer no other one.")
    return ParsedQuestion((described,), relations)


def read_facts(observations: Iterable[str]) -> dict[tuple[Relation, str], str]:
    """Return the facts that the passages in observations state, as a dict from (relation, argument) to value."""
    return {
        (relation, title if match["s"] in PRONOUNS else match["s"]): match["o"]
        for title, text in _PASSAGE.findall("\n".join(observations))
        for sentence in _SENTENCE_END.split(text)
        for relation, match in _matches(sentence, "sentences")
    }


def _matches(text: str, forms: str) -> Iterator[tuple[Relation, re.Match[str]]]:
    """Yield each relation with a template that matches a text, and the match.

    Args:
        text: the text to match.
        forms: field of :class:`Relation` with the templates, such as ``questions``.
    """
    for relation in RELATIONS:
        for form in getattr(relation, forms):
            if match := _pattern(form).fullmatch(text):
                yield relation, match


@cache
def _pattern(form: str) -> re.Pattern[str]:
    """Return the regex of a text template: ``{s}`` and ``{o}`` become groups with these names, ``{}`` an unnamed group."""
    pattern = re.escape(form).replace(r"\{s\}", "(?P<s>.+)").replace(r"\{o\}", "(?P<o>.+)")
    return re.compile(pattern.replace(r"\{\}", "(.+)"))


class SearchExpert:
    """Searches for the names in the question, follows the question's relations from passage to passage, and answers."""

    def reset(self, task: str, observation: str, seed: int) -> None:
        """Start an episode; ``task`` is the environment's ``info["task"]``.

        Raises:
            ValueError: the task is not a question about a generated world.
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
        """Return the actions from which :meth:`act` draws in this turn."""
        facts = read_facts([*self._observations, observation])
        if self._question.direction:
            return self._compare(facts)
        (name,) = self._question.names
        for relation in self._question.relations:
            if (relation, name) not in facts:
                return [self._search(name, relation)]
            name = facts[relation, name]
        return [f"answer[{name}]"]

    def carried_out(self, action: str) -> None:
        """Record that ``action`` was carried out instead of the action returned by :meth:`act`."""
        self._actions[-1] = action

    def _search(self, name: str, relation: Relation) -> str:
        """Return a search for ``name``; if this search was made before, the query also contains words of ``relation``."""
        search = f"search[{name}]"
        return f"search[{relation.sentences[0].format(s=name, o='')}]" if search in self._actions else search

    def _compare(self, facts: Mapping[tuple[Relation, str], str]) -> list[str]:
        """Return searches for the compared names whose years are not known yet; if there are none, the answer."""
        (relation,), names = self._question.relations, self._question.names
        if unknown := [name for name in names if (relation, name) not in facts]:
            return [self._search(name, relation) for name in unknown]
        choose = min if self._question.direction == "earlier" else max
        return [f"answer[{choose(names, key=lambda name: int(facts[relation, name]))}]"]


class ForgetfulExpert(SearchExpert):
    """An expert that uses only the question, its last action, and the observations before and after this action.

    The expert does not count the relations that it has followed. If the passages state several of the question's relations
    for the name of its last search, it follows any of them. Earlier actions matter only if the question compares two names: a
    repeated search for the same name has more words.
    """

    def options(self, observation: str, admissible: Sequence[str]) -> list[str]:
        """Return the actions from which :meth:`act` draws in this turn."""
        if self._question.direction:
            return self._compare(read_facts([*self._observations[-1:], observation]))
        facts = read_facts([observation])
        last = self._actions[-1].removeprefix("search[").removesuffix("]") if self._actions else ""
        *inner, outermost = self._question.relations
        follow = [f"search[{facts[relation, last]}]" for relation in inner if (relation, last) in facts]
        answer = [f"answer[{facts[outermost, last]}]"] if (outermost, last) in facts else []
        return [*follow, *answer] or [f"search[{self._question.names[0]}]"]

"""Generated worlds: invented people, places, works and organisations, passages about them, and questions about the passages.

A world is a pure function of the arguments of :class:`World`, so every process generates the same world.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

from trial_envs.search_qa.relations import COMPARED, KINDS, PERSON, PRONOUNS, REGION, RELATIONS, YEAR

VERSION = 1
"""Version of the generator; increase it whenever a change makes :class:`World` generate other worlds from the same arguments."""
FAMILIES = ("one_hop", "two_hop", "three_hop", "comparison")
"""Kinds of questions."""
_SHARES = {"region": 0.03, "town": 0.15, "organisation": 0.12, "work": 0.25, "person": 0.25}
"""Share of the passages that describe entities of each kind; the other passages are about events."""
_FORMS = {
    "region": "{}ia",
    "town": "{} | {} | New {} | {} Bridge",
    "organisation": "{} Guild | {} Press | {} Institute | {} Museum | {} Company",
    "work": "The Lanterns of {} | The Ledger of {} | The Silence of {} | The Stairs of {} | The Foxes of {}",
    "person": "{1} {0}",
}
"""Templates of names by kind of entity: ``{}`` or ``{0}`` is an invented word that other names may share, ``{1}`` a first name."""
_EVENT = (
    "The fair drew visitors to {town}. Among them was {person}, who read from {work}. A prize went to {organisation}, and "
    "guests came from {region}."
)
"""Text of a passage about an event. It mentions entities of the world, but answers no question."""


class Passage(NamedTuple):
    """A passage of a corpus."""

    title: str
    text: str


class Question(NamedTuple):
    """A question.

    Attributes:
        text: the question.
        answers: accepted answers, at least one.
        family: kind of the question, or the data set from which it comes.
        searches: queries whose results together contain the answer; empty if they are not known.
    """

    text: str
    answers: tuple[str, ...]
    family: str
    searches: tuple[str, ...] = ()


def _invent(rng: random.Random) -> str:
    """Return an invented word in lower case."""
    return "".join(rng.choice("bdfghklmnprstvz") + rng.choice("aeiou") for _ in range(3)) + rng.choice("nlrsk")


SHORT_NAMES = tuple(_invent(random.Random(f"short name {number}")) for number in range(160))
"""Names of the entities in worlds with ``concise=True``; each world assigns the names to the entities differently."""


class World:
    """A generated world: its entities (``things`` in the code), and their facts.

    Args:
        name: any text; it seeds the random generator, so worlds with different names have different facts.
        num_passages: number of passages, at least 16; in a concise world at most the number of :data:`SHORT_NAMES`.
        concise: whether texts are short: names are single words of :data:`SHORT_NAMES`, years have two digits, and the passage
            about an entity states only facts.
    """

    def __init__(self, name: str, num_passages: int, concise: bool) -> None:
        self._name, self._num_passages, self._concise = name, num_passages, concise
        self._rng = random.Random(f"world {name}")
        self._things = self._name_things()
        self._things[YEAR] = list(map(str, range(10, 40) if concise else range(1500, 2000)))
        self._facts = {relation: dict(self._draw_facts(relation.subject, relation.object)) for relation in RELATIONS}

    def passages(self) -> Iterator[Passage]:
        """Yield the passages: one about each entity, then the passages about events."""
        rng = random.Random(f"passages {self._name}")
        things = [(kind, thing) for kind in KINDS for thing in self._things[kind]]
        for kind, thing in things:
            yield Passage(thing, " ".join(self._describe(kind, thing, rng)))
        for _ in range(self._num_passages - len(things)):
            mentioned = {kind: rng.choice(self._things[kind]) for kind in KINDS}
            yield Passage(
                f"{_invent(rng).title()} Fair of {rng.choice(self._things[YEAR])}", _EVENT.format(**mentioned)
            )

    def questions(self, number: int, families: Sequence[str] = FAMILIES) -> Iterator[Question]:
        """Yield ``number`` questions, whose families alternate; each has exactly one answer in the world."""
        for position in range(number):
            rng = random.Random(f"question {self._name} {position}")
            hops = FAMILIES.index(families[position % len(families)]) + 1
            yield self._compare(rng) if hops == len(FAMILIES) else self._follow(hops, rng)

    def _name_things(self) -> dict[str, list[str]]:
        """Draw different names for the entities of each kind.

        Names share words, so a search for one name also returns passages about other entities. In a concise world, each name is
        one unique word.
        """
        rng, number, things = self._rng, self._num_passages, {}
        short = rng.sample(SHORT_NAMES, len(SHORT_NAMES))
        words = [_invent(rng).title() for _ in range(number // 2)]
        first = words[: int(number**0.5)]
        for kind, share in _SHARES.items():
            forms, names = _FORMS[kind].split(" | "), dict[str, None]()
            while len(names) < max(2, share * number):
                long = rng.choice(forms).format(rng.choice(words), rng.choice(first))
                names[short.pop() if self._concise else long] = None
            things[kind] = list(names)
        return things

    def _draw_facts(self, subject: str, value: str) -> Iterator[tuple[str, str]]:
        """Draw the facts of a relation: yield each entity of the kind ``subject`` with a value of the kind ``value``."""
        values = self._things[value]
        if REGION in (subject, value):  # Pair towns and regions by position, so that every capital lies in its region.
            yield from zip(self._things[subject], cycle(values), strict=False)
            return
        for thing in self._things[subject]:
            while (drawn := self._rng.choice(values)) == thing:
                pass
            yield thing, drawn

    def _describe(self, kind: str, thing: str, rng: random.Random) -> Iterator[str]:
        """Yield the sentences of an entity's passage in random order; later sentences may start with a pronoun."""
        pronoun = rng.choice(PRONOUNS[1:]) if kind == PERSON else PRONOUNS[0]
        relations = [relation for relation in RELATIONS if relation.subject == kind]
        rng.shuffle(relations)
        for relation in relations:
            form = rng.choice(relation.sentences)
            named = self._concise or relation is relations[0] or not form.startswith("{s}") or rng.random() < 0.5
            yield form.format(s=thing if named else pronoun, o=self._facts[relation][thing])
        if not self._concise:
            yield f"{thing} is sometimes confused with {rng.choice(self._things[kind])}."

    def _follow(self, hops: int, rng: random.Random) -> Question:
        """Return a question about the last value of a chain of ``hops`` relations, in which no entity occurs twice."""
        while True:
            kind = rng.choice(KINDS)
            text = rng.choice(self._things[kind])
            chain = [text]
            for hop in range(1, hops + 1):
                candidates = [item for item in RELATIONS if item.subject == kind and (hop == hops or item.phrases)]
                relation = rng.choice(candidates)
                text = rng.choice(relation.questions if hop == hops else relation.phrases).format(text)
                chain.append(self._facts[relation][chain[-1]])
                kind = relation.object
            if len(set(chain)) == len(chain):
                return Question(text, (chain[-1],), FAMILIES[hops - 1], tuple(chain[:-1]))

    def _compare(self, rng: random.Random) -> Question:
        """Return a question that compares the years of two entities."""
        while True:
            relation, direction = rng.choice(COMPARED), rng.choice(("earlier", "later"))
            first, second = sorted(rng.sample(self._things[relation.subject], 2), key=self._facts[relation].__getitem__)
            if self._facts[relation][first] != self._facts[relation][second]:
                names = tuple(rng.sample((first, second), 2))
                text = relation.comparisons[0].format(direction, *names)
                return Question(text, (first if direction == "earlier" else second,), FAMILIES[3], names)

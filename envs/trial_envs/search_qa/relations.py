"""The relations of the generated worlds: how passages state them, and how questions ask for their values."""

from __future__ import annotations

from dataclasses import dataclass

REGION, TOWN, ORGANISATION, WORK, PERSON = KINDS = ("region", "town", "organisation", "work", "person")
"""Kinds of entities that passages describe."""
YEAR = "year"
PRONOUNS = ("It", "He", "She")
"""Words that replace the title of a passage at the start of a sentence."""

_TABLE = """
work | person | {s} was written by {o}. / {o} is the author of {s}. / {s} is a book by {o}.
  | Who wrote {}? / Which person is the author of {}? | the author of {} / the writer of {} |
work | organisation | {s} was published by {o}. / {o} brought out {s}.
  | Who published {}? / Which organisation brought out {}? | the publisher of {} |
work | year | {s} was first printed in {o}. / {s} appeared in {o}.
  | In which year did {} appear? / When was {} first printed? | | Which appeared {}, {} or {}?
person | town | {s} was born in {o}. / {s} comes from {o}. / {o} is the birthplace of {s}.
  | Where was {} born? / In which town was {} born? | the birthplace of {} / the town where {} was born |
person | year | {s} was born during {o}. / The birth of {s} dates from {o}.
  | In which year was {} born? / When was {} born? | | Who was born {}, {} or {}?
person | organisation | {s} worked for {o}. / {o} employed {s}.
  | Who employed {}? / Which organisation did {} work for? | the employer of {} |
person | person | {s} was taught by {o}. / {o} was the teacher of {s}.
  | Who taught {}? / Who was the teacher of {}? | the teacher of {} |
organisation | person | {s} was founded by {o}. / {o} is the founder of {s}.
  | Who founded {}? / Which person is the founder of {}? | the founder of {} |
organisation | town | {s} is based in {o}. / {s} has its office in {o}.
  | Where is {} based? / In which town is {} based? | the seat of {} / the town where {} is based |
organisation | year | {s} was founded in {o}. / The foundation of {s} took place in {o}.
  | In which year was {} founded? / When was {} founded? | | Which was founded {}, {} or {}?
town | region | {s} is a town in {o}. / {s} lies in {o}.
  | In which region does {} lie? / Which region is {} in? | the region of {} |
town | year | {s} was settled in {o}. / Settlers came to {s} in {o}.
  | In which year was {} settled? / When was {} settled? | | Which was settled {}, {} or {}?
region | town | {s} is governed from {o}. / The capital of {s} is {o}.
  | What is the capital of {}? / From which town is {} governed? | the capital of {} |
"""
"""Fields of each :class:`Relation`, separated by ``|``; the alternatives in a field are separated by ``/``.

The first line of a relation has subject, object and sentences, the second line questions, phrases and comparisons. Each question,
phrase and sentence belongs to only one relation."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation that gives each entity of one kind a value: another entity or a year.

    Attributes:
        subject: kind of the entities that have a value (the arguments).
        object: kind of the values, or :data:`YEAR`.
        sentences: statements of a passage, with ``{s}`` for the argument and ``{o}`` for the value.
        questions: questions for the value, with ``{}`` for the argument.
        phrases: descriptions of the value within a question, with ``{}`` for the argument; empty for years.
        comparisons: questions that compare the years of two arguments, with ``{}`` for ``earlier`` or ``later`` and for each
            argument.
    """

    subject: str
    object: str
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    phrases: tuple[str, ...]
    comparisons: tuple[str, ...]


def _read_table() -> tuple[Relation, ...]:
    rows = [row.split("|") for row in _TABLE.replace("\n  ", " ").strip().split("\n")]
    return tuple(
        Relation(
            subject.strip(), value.strip(), *(tuple(filter(None, map(str.strip, cell.split("/")))) for cell in cells)
        )
        for subject, value, *cells in rows
    )


RELATIONS = _read_table()
COMPARED = tuple(relation for relation in RELATIONS if relation.comparisons)
"""Relations with questions that compare the years of two entities."""

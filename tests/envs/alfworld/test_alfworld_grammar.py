"""Derivation of texts: queries over facts, lists, conditions, and the few expressions that are understood."""

import pytest

from trial_envs.alfworld.engine import Facts, entity_names
from trial_envs.alfworld.generator import engine_texts
from trial_envs.alfworld.grammar import INTRO, Grammar, compile_grammar, solutions
from trial_envs.errors import CorruptGameError

ROOM = frozenset(
    {
        ("atlocation", "agent1", "loc_1"),
        ("receptacleatlocation", "desk_bar_1", "loc_1"),
        ("receptacleatlocation", "shelf_bar_1", "loc_2"),
        ("inreceptacle", "pen_bar_1", "desk_bar_1"),
        ("inreceptacle", "mug_bar_1", "desk_bar_1"),
        ("inreceptacle", "mug_bar_2", "desk_bar_1"),
        ("next_to", "mug_bar_1", "mug_bar_1"),
        ("next_to", "mug_bar_1", "pen_bar_1"),
    }
)


def grammar_with(sentence: str) -> tuple[Grammar, str]:
    return compile_grammar(engine_texts()[1].replace("Your task is to: UNKNOWN GOAL.", sentence))


def test_two_placeholders_never_stand_for_one_entity():
    assert [s["y"] for s in solutions((("next_to", ("x", "y")),), Facts(ROOM), {})] == ["pen_bar_1"]


def test_an_effect_replaces_the_fact_by_its_negation_and_back():
    facts = Facts(ROOM)
    facts.apply("NegatedAtom inreceptacle(pen_bar_1, desk_bar_1)")
    assert not facts.holds("inreceptacle", ("pen_bar_1", "desk_bar_1"))
    assert facts.holds("not_inreceptacle", ("pen_bar_1", "desk_bar_1"))
    facts.apply("Atom inreceptacle(pen_bar_1, desk_bar_1)")
    assert facts.sorted_arguments("inreceptacle") == Facts(ROOM).sorted_arguments("inreceptacle")
    assert facts.sorted_arguments("not_inreceptacle") == []


def test_markup_in_a_sentence_is_derived_as_the_engine_does():
    names = entity_names(ROOM)
    grammar, _ = grammar_with("Choose from #list_appliances#.")
    assert grammar.derive(INTRO, Facts(ROOM), names, {}).endswith("Choose from a desk 1, and a shelf 1.")
    with pytest.raises(CorruptGameError, match="#moon#"):
        grammar_with("Fly to the #moon#.")[0].derive(INTRO, Facts(ROOM), names, {})

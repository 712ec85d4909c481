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


def test_solutions_come_in_ascending_order_and_respect_what_is_bound():
    facts = Facts(ROOM)
    found = list(solutions((("inreceptacle", ("o", "r")),), facts, {"r": "desk_bar_1"}))
    assert [s["o"] for s in found] == ["mug_bar_1", "mug_bar_2", "pen_bar_1"]
    assert list(solutions((("inreceptacle", ("o", "r")),), facts, {"r": "shelf_bar_1"})) == []
    joined = (("atlocation", ("a", "l")), ("receptacleatlocation", ("r", "l")))
    assert [s["r"] for s in solutions(joined, facts, {})] == ["desk_bar_1"]


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


def test_names_count_down_within_a_kind_and_basins_are_named_so():
    names = entity_names(frozenset({("in", "mug_bar_a", "sink_bar_x_bar_sinkbasin"), ("in", "mug_bar_b", "agent1")}))
    assert names.pop("agent1") == "agent1 "
    assert names == {"mug_bar_a": "mug 2", "mug_bar_b": "mug 1", "sink_bar_x_bar_sinkbasin": "sinkbasin 1"}


def test_lists_of_none_one_and_several_things():
    grammar, _ = grammar_with("Your task is to: rest.")
    names = entity_names(ROOM)
    look_in = grammar.actions["examinereceptacle"].feedback
    several = grammar.derive(look_in, Facts(ROOM), names, {"r": "desk_bar_1"})
    assert several == "On the desk 1, you see a mug 2, a mug 1, and a pen 1."
    assert grammar.derive(look_in, Facts(ROOM), names, {"r": "shelf_bar_1"}) == "On the shelf 1, you see nothing."
    one = Facts(frozenset(fact for fact in ROOM if "mug" not in fact[1]))
    assert grammar.derive(look_in, one, names, {"r": "desk_bar_1"}) == "On the desk 1, you see a pen 1."


@pytest.mark.parametrize("sentence", ["Your task is to: put a pen in desk.", "Do it — and don't (ever) stop."])
def test_the_task_sentence_ends_the_first_observation(sentence):
    grammar, task = grammar_with(sentence)
    assert task == sentence
    assert grammar.derive(INTRO, Facts(ROOM), entity_names(ROOM), {}).endswith(f"\n\n{sentence}")


def test_markup_in_a_sentence_is_derived_as_the_engine_does():
    names = entity_names(ROOM)
    grammar, _ = grammar_with("Choose from #list_appliances#.")
    assert grammar.derive(INTRO, Facts(ROOM), names, {}).endswith("Choose from a desk 1, and a shelf 1.")
    with pytest.raises(CorruptGameError, match="#moon#"):
        grammar_with("Fly to the #moon#.")[0].derive(INTRO, Facts(ROOM), names, {})


def test_games_with_different_sentences_do_not_share_them():
    first, second = grammar_with("Your task is to: run."), grammar_with("Your task is to: walk.")
    texts = [grammar.derive(INTRO, Facts(ROOM), entity_names(ROOM), {}) for grammar, _ in (first, second)]
    assert [text.rsplit(" ", 1)[1] for text in texts] == ["run.", "walk."]

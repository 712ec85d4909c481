import pytest
from hypothesis import given
from hypothesis import strategies as st

from trial_envs.core.projection import Projection, project_action


def test_tagged_response_gives_lower_cased_action_without_outer_blanks():
    response = "<think>The pencil is Here.</think>\n<action> Take Pencil 1 from Desk 1 </action>"
    assert project_action(response, "tagged") == Projection("take pencil 1 from desk 1", True)


def test_first_opening_and_first_closing_tag_count():
    response = "<think>a</think><action>look</action> or <action>inventory</action>"
    assert project_action(response).action == "look"
    assert project_action("<think>a</think><action>go <action>look</action>").action == "go <action>look"


@pytest.mark.parametrize(
    "response",
    [
        "<action>look</action>",
        "<think>x<action>look</action>",
        "x</think><action>look</action>",
        "</think><think><action>look</action>",
    ],
)
def test_response_without_reasoning_is_invalid_but_its_action_is_used(response):
    assert project_action(response) == Projection("look", False)


@pytest.mark.parametrize("ideograph", ["看", "㐀", "豈", "\U00020000"])
def test_cjk_anywhere_makes_the_response_invalid(ideograph):
    assert project_action(f"<think>{ideograph}</think><action>look</action>") == Projection("look", False)


@pytest.mark.parametrize("tail", [20, 30])
@pytest.mark.parametrize("broken", ["{}", "<action>{}", "{}</action>", "</action>{}<action>"])
def test_missing_action_tag_falls_back_to_the_tail(tail, broken):
    response = "<think>x</think>" + broken.format("I would rather GO TO the countertop 1 now")
    assert project_action(response, tail=tail) == Projection(response.lower()[-tail:], False)


def test_plain_response_is_the_action():
    assert project_action("  Go to desk 1\n", "plain") == Projection("Go to desk 1", True)
    assert project_action(" \n\t ", "plain") == Projection("", False)


@given(st.text(), st.text(), st.integers(1, 40))
def test_fallback_is_never_longer_than_the_tail(before, after, tail):
    projection = project_action(before + after, tail=tail)
    assert len(projection.action) <= tail or projection.action in (before + after).lower()


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<think>x</think><ACTION> [Nf3] </Action>", "[Nf3]"),
        ("<think>İ</think><action>A C</action>", "A C"),
        ("no Tags", "no Tags"),
    ],
)
def test_the_case_of_an_action_can_be_kept(response, action):
    assert project_action(response, keep_case=True).action == action
    assert project_action(response, keep_case=True).valid is project_action(response).valid
    assert project_action(response).action == action.lower()

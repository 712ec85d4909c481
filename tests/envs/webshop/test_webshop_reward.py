"""Rules of the reward that recorded cases leave open: thresholds, colours, and pairs."""

import pytest

from trial_envs.webshop.reward import count_options, option_matches, plain_colour, target_text, texts_match, type_reward


@pytest.mark.parametrize(
    ("one", "other", "match"),
    [
        ("abcdefghijklmnopqrst", "abcdefghijklmnopq123", False),  # 85 exactly
        ("abcdefghijklmnopqrst", "abcdefghijklmnopqr12", True),  # 90
        ("long sleeve", "sleeve long", True),
        ("long sleeve", "long sleeve shirt", True),
        ("Long-Sleeve", "long sleeve", True),
        ("café", "caf", True),  # Latin-1 letters beyond ASCII are dropped
        ("", "long sleeve", False),
        ("", "", False),
        ("&", "&", False),
    ],
)
def test_texts_match_above_85(one, other, match):
    assert texts_match(one, other) is match


@pytest.mark.parametrize(
    ("same_kind", "title_score", "expected"),
    [(True, 1.0, 1.0), (True, 0.1, 1.0), (True, 0.09, 0.1), (True, 0.0, 0.0), (False, 0.2, 0.5), (False, 0.21, 1.0)],
)
def test_the_kind_counts_by_collection_category_and_title(same_kind, title_score, expected):
    assert type_reward(same_kind, title_score) == expected


def test_the_first_colour_of_the_list_stands_for_a_text():
    assert plain_colour("navy blue") == "blue"
    assert plain_colour("distant") == "tan"
    assert plain_colour("small") == "small"


def test_pairs_are_compared_as_written_unless_a_member_is_a_colour():
    assert target_text(("color", "navy")) == "navy"
    assert target_text(("color", "navy stripes")) == "('color', 'navy stripes')"
    assert option_matches("navy stripes", ("color", "navy stripes"))
    assert not option_matches("redwood", ("color", "redwood"))
    assert option_matches("size", ("size", "medium"))  # by its name


def test_one_value_may_fulfil_several_targets_but_counts_each_once():
    assert count_options(["medium", "medium"], [("size", "medium"), ("fit", "medium")]) == 2
    assert count_options([], [("size", "medium")]) == 0

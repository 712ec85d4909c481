"""Scores and rankings equal those that released code gave; tests/support/record_search_qa.py recorded them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from record_search_qa import QUERIES, RANKINGS, SCORES, TOP, WORLD, odd_pairs
from recordings import read_lines

from trial_envs.search_qa.corpus import write_corpus
from trial_envs.search_qa.scoring import exact_match, f1
from trial_envs.search_qa.world import World
from trial_envs.text_index.search import SearchIndex


def test_scores_equal_those_of_search_r1_and_squad():
    (rows,) = read_lines(SCORES)
    assert [(answer, accepted) for answer, accepted, *_ in rows] == odd_pairs()
    for answer, accepted, search_r1, squad, overlap in rows:
        assert exact_match(answer, accepted) == bool(search_r1) == bool(squad)
        assert abs(f1(answer, accepted) - overlap) < 1e-12
    assert 300 < sum(row[2] for row in rows) < 1700
    assert sum(0 < row[4] < 1 for row in rows) > 300


@given(st.text(), st.lists(st.text()))
def test_scores_of_any_text_agree_with_each_other(answer, accepted):
    score, won = f1(answer, accepted), exact_match(answer, accepted)
    assert 0 <= score <= 1
    assert score == 1 or not won
    assert f1(answer, [*accepted, answer]) == 1
    assert exact_match(f"The {answer.upper().lower()}!", [answer.upper().lower()])


def test_rankings_equal_those_of_bm25s(tmp_path):
    """Passages are short, so that Lucene's rounding of lengths does not change them."""
    world = World(*WORLD)
    passages = list(world.passages())
    folder = write_corpus(tmp_path / "index", passages, {"all": world.questions(QUERIES)}, {})
    index, (rankings,) = SearchIndex(folder, len(passages)), read_lines(RANKINGS)
    assert len(rankings) == QUERIES
    for query, expected in rankings:
        positions, scores = index.rank(query, TOP)
        assert positions.tolist() == [position for position, _ in expected], query
        assert np.allclose(scores, [score for _, score in expected], atol=2e-4), query

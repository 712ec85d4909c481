"""Turns of ``style="search_r1"`` equal those of the released loop; tests/support/record_search_qa.py recorded them."""

from record_search_qa import SEARCHES, TURNS, recorded_environment
from recordings import read_lines


def test_turns_equal_those_of_search_r1():
    """White space around passages, the text after an invalid response, and the last turn, which cannot search, are our own."""
    (episodes,) = read_lines(TURNS)
    env, searches, invalid = recorded_environment(style="search_r1"), 0, 0
    for task, episode in zip(env.tasks(), episodes, strict=True):
        env.reset(options={"task": task})
        for number, (response, observation, done, valid) in enumerate(episode, start=1):
            shown, _, terminated, _, info = env.step(response)
            assert terminated == done, response
            if number > SEARCHES:
                continue
            assert info["invalid_action"] == (not valid), response
            if valid and not done:
                assert shown == observation.strip()
            searches += valid and not done
            invalid += not valid
    assert searches > 20
    assert invalid > 10

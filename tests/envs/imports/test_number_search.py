"""The scripted player of number games wins in as many guesses as halving the range takes."""

import math

import pytest

from trial_envs.imports.number_search import NumberSearch


def guesses(task: str, hidden: int, form: str) -> list[int]:
    player, told = NumberSearch(form), "Guess."
    player.reset(task, told, 0)
    made = []
    while True:
        action = player.act(told, ())
        player.carried_out(action)
        made.append(int("".join(filter(str.isdigit, action))))
        if made[-1] == hidden:
            return made
        told = "The target number is higher." if hidden > made[-1] else "The target number is lower."


@pytest.mark.parametrize(("least", "most"), [(1, 20), (7, 7), (3, 52)])
@pytest.mark.parametrize("form", ["[{}]", "\\boxed{{{}}}"])
def test_the_range_is_halved(least, most, form):
    task = f"You have to guess the number between {least} and {most} within 10 turns."
    assert NumberSearch.plays(task)
    limit = math.floor(math.log2(most - least + 1)) + 1
    assert all(len(guesses(task, hidden, form)) <= limit for hidden in range(least, most + 1))


def test_only_what_was_carried_out_narrows_the_range():
    player = NumberSearch("[{}]")
    player.reset("Guess the number between 1 and 9.", "", 0)
    assert player.act("start", ()) == "[5]"
    player.carried_out("[2]")
    assert player.act("The target number is higher.", ()) == "[6]"
    player.carried_out("nothing")
    assert player.act("You attempted an invalid move.", ()) == "[6]"
    player.carried_out("[1]")  # an answer that contradicts none of the former ones
    assert player.act("The target number is higher.", ()) == "[6]"

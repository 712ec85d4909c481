"""The scripted policy of number games needs at most as many guesses as halving the range."""

from trial_envs.imports.number_search import NumberSearch


def guesses(task, hidden, form):
    expert, observation = NumberSearch(form), "Guess."
    expert.reset(task, observation, 0)
    made = []
    while True:
        action = expert.act(observation, ())
        expert.carried_out(action)
        made.append(int("".join(filter(str.isdigit, action))))
        if made[-1] == hidden:
            return made
        observation = f"The target number is {'higher' if hidden > made[-1] else 'lower'}."


def test_the_range_is_halved():
    for least, most, form in ((1, 20, "[{}]"), (7, 7, "[{}]"), (3, 52, "\\boxed{{{}}}")):
        task = f"You have to guess the number between {least} and {most} within 10 turns."
        assert NumberSearch.plays(task)
        hidden = range(least, most + 1)
        assert all(len(guesses(task, number, form)) <= len(hidden).bit_length() for number in hidden)


def test_only_executed_actions_narrow_the_range():
    expert = NumberSearch("[{}]")
    expert.reset("Guess the number between 1 and 9.", "", 0)
    assert expert.act("start", ()) == "[5]"
    higher = "The target number is higher."
    # The last answer is consistent with the earlier answers.
    for executed, answer in {"[2]": higher, "nothing": "You attempted an invalid move.", "[1]": higher}.items():
        expert.carried_out(executed)
        assert expert.act(answer, ()) == "[6]"

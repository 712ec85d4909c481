"""Generated worlds: repeatable, answerable by reading, and different for every split."""

import re
from collections import defaultdict

import pytest
from text_games import begin, play_expert, win

from trial_envs.search_qa.corpus import GENERATED
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.expert import ForgetfulExpert, SearchExpert, parse_question
from trial_envs.search_qa.world import SHORT_NAMES, World

HOPS = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "comparison": 2}


@pytest.fixture(params=[{"difficulty": "tiny", "num_worlds": 8}, {"num_passages": 2000}], ids=str)
def env(own_cache, request):
    return SearchQAEnv("generated", num_games=240, **request.param)


def solved(env, expert):
    """Return by family the share of questions that an expert answers with at most one search more than hops."""
    shares = defaultdict(list)
    for info, actions in play_expert(env, expert):
        shares[info["family"]].append(info["won"] and len(actions) <= HOPS[info["family"]] + 2)
    return {family: sum(won) / len(won) for family, won in shares.items()}


def test_the_expert_answers_nearly_all_questions(env):
    shares = solved(env, SearchExpert)
    assert list(shares) == list(HOPS)
    assert min(shares.values()) >= 0.95


def test_the_forgetful_expert_answers_fewer(env):
    shares = solved(env, ForgetfulExpert)
    assert min(shares["one_hop"], shares["comparison"]) > 0.95
    assert 0.4 < shares["three_hop"] < 0.9


def test_every_family_occurs_if_each_world_has_one_question(own_cache):
    env = SearchQAEnv("generated", difficulty="tiny", num_worlds=8, num_games=8)
    assert [env.family(task) for task in env.tasks()] == [*HOPS] * 2
    chosen = ["comparison", "one_hop"]
    env = SearchQAEnv("generated", difficulty="tiny", num_worlds=2, num_games=4, families=chosen)
    assert [env.family(task) for task in env.tasks()] == ["comparison", "one_hop", "one_hop", "comparison"]


def test_the_walkthrough_of_every_question_wins(env):
    for task in env.tasks():
        win(env, task)


@pytest.mark.parametrize(("passages", "concise"), [(24, True), (600, False)])
def test_the_passages_state_every_answer_exactly_once(passages, concise):
    world = World("some world", passages, concise)
    texts = dict(world.passages())
    assert len(texts) == passages
    for question in world.questions(80):
        names, relations, direction = parse_question(question.text)
        values = []
        for name in names:
            for relation in relations:
                values.append(stated(relation, name, texts[name]))
                name = values[-1]
        if direction:
            first, second = map(int, values)
            assert question.answers == (names[(first > second) == (direction == "earlier")],)
        else:
            assert question.answers == (values[-1],)
            assert question.searches == (names[0], *values[:-1])


def stated(relation, name, text):
    """Return the only value that a passage states; shares no code with the expert."""
    values = set()
    for form in relation.sentences:
        for subject in (name, "It", "He", "She"):
            before, after = map(re.escape, form.format(s=subject, o="\n").split("\n"))
            values |= set(re.findall(rf"(?:^|(?<=\. )){before}([^.]+?){after}", text))
    (value,) = values
    return value


def test_worlds_of_other_names_share_no_title():
    first, other = (dict(World(name, 300, False).passages()) for name in ("one", "two"))
    assert not first.keys() & other.keys()


def test_splits_and_seeds_share_no_world(own_cache):
    questions = set()
    for number in range(6):
        for settings in ({"num_passages": 300}, {"difficulty": "tiny"}):
            env = SearchQAEnv(GENERATED[number % 3], num_games=8, generator_seed=number // 3, **settings)
            questions |= {begin(env, task)[1]["task"] for task in env.tasks()}
    assert len(questions) > 90  # small worlds may have a question in common, with other facts


def test_short_names_are_different_and_no_words_of_questions():
    words = {word for question in World("w", 300, False).questions(200) for word in question.text.lower().split()}
    assert len({*SHORT_NAMES} - words) == 160

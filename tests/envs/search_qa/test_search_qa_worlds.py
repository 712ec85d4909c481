"""Generated worlds: repeatable, answerable by reading, and different for every split."""

import re
from collections import defaultdict

import pytest
from text_games import play_expert, win

from trial_envs.search_qa.corpus import GENERATED
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.expert import ForgetfulExpert, SearchExpert, parse_question
from trial_envs.search_qa.world import FAMILIES, SHORT_NAMES, World

HOPS = {"one_hop": 1, "two_hop": 2, "three_hop": 3, "comparison": 2}
LEVELS = pytest.mark.parametrize("level", [{"difficulty": "tiny", "num_worlds": 8}, {"num_passages": 2000}], ids=str)


@pytest.fixture
def env(own_cache, level):
    env = SearchQAEnv("generated", num_games=240, **level)
    yield env
    env.close()


def play(env, expert):
    """Return by family whether each question was won, and its number of searches."""
    played = defaultdict(list)
    for task in env.tasks():
        info, actions = play_expert(env, task, expert(), int(task))
        played[info["family"]].append((info["won"], sum(action.startswith("search[") for action in actions)))
    return played


@LEVELS
def test_the_expert_answers_with_at_most_one_search_more_than_hops(env):
    played = play(env, SearchExpert)
    assert list(played) == list(FAMILIES)
    for family, episodes in played.items():
        solved = sum(won and searches <= HOPS[family] + 1 for won, searches in episodes)
        assert solved >= 0.95 * len(episodes), family


@LEVELS
def test_the_forgetful_expert_wins_less_often(env):
    played = play(env, ForgetfulExpert)
    won = {family: sum(won for won, _ in episodes) / len(episodes) for family, episodes in played.items()}
    assert won["one_hop"] > 0.95
    assert 0.4 < won["three_hop"] < 0.95


@LEVELS
def test_the_walkthrough_of_every_question_wins(env):
    for task in env.tasks():
        win(env, task)


@pytest.mark.parametrize(("passages", "concise"), [(24, True), (600, False)])
def test_every_answer_is_stated_and_only_once(passages, concise):
    """Questions are parsed and followed through the texts of all passages, with a reader that shares no code with the expert."""
    world = World("some world", passages, concise)
    texts = dict(world.passages())
    assert len(texts) == passages
    for question in world.questions(80):
        parsed = parse_question(question.text)
        values = []
        for name in parsed.names:
            for relation in parsed.relations:
                values.append(stated(relation, name, texts[name]))
                name = values[-1]
        if parsed.direction:
            earlier = int(values[0]) < int(values[1])
            assert question.answers == (parsed.names[earlier != (parsed.direction == "earlier")],)
        else:
            assert question.answers == (values[-1],)
            assert question.searches == (parsed.names[0], *values[:-1])


def stated(relation, name, text):
    """Return the only value that a passage states."""
    found = set()
    for form in relation.sentences:
        for subject in (name, "It", "He", "She"):
            before, after = map(re.escape, form.format(s=subject, o="\n").split("\n"))
            found |= set(re.findall(rf"(?:^|(?<=\. )){before}([^.]+?){after}", text))
    (value,) = found
    return value


def test_a_world_is_the_same_in_every_process_and_other_worlds_differ():
    first, again, other = (World(name, 300, False) for name in ("one", "one", "two"))
    assert list(first.passages()) == list(again.passages())
    assert list(first.questions(50)) == list(again.questions(50))
    assert list(first.questions(1)) != list(other.questions(1))
    assert not dict(first.passages()).keys() & dict(other.passages()).keys()


def test_splits_and_seeds_share_no_world(own_cache):
    worlds = {
        (split, seed): {env.reset(options={"task": task})[1]["task"] for task in env.tasks()}
        for split in GENERATED
        for seed in (0, 1)
        if (env := SearchQAEnv(split, num_passages=300, num_games=40, generator_seed=seed))
    }
    assert sum(map(len, worlds.values())) == len(set().union(*worlds.values()))
    tiny = {
        SearchQAEnv(split, difficulty="tiny", num_games=1).reset(options={"task": 0})[1]["task"] for split in GENERATED
    }
    assert len(tiny) == len(GENERATED)


def test_short_names_are_different_and_no_words_of_questions():
    assert len({*SHORT_NAMES}) == len(SHORT_NAMES)
    words = {word for question in World("w", 300, False).questions(200) for word in question.text.lower().split()}
    assert not words & {*SHORT_NAMES}

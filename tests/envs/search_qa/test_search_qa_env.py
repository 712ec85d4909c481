"""``trial/SearchQA-v0``: interface, limits, rewards, styles, tools, and bad input."""

import copy

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from text_games import begin

from trial_envs import errors
from trial_envs.search_qa.corpus import write_corpus
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.world import Passage, Question

PASSAGES = [
    Passage("Lamps", "Lamps are red."),
    Passage("Chairs", "Chairs are blue [or so]."),
    Passage("Odd", "\ud800 x"),
]
QUESTIONS = [
    Question("Which colour have lamps?", ("The red one", "red"), "nq"),
    Question("And chairs?", ("blue",), "popqa"),
]
TINY = {"split": "generated", "difficulty": "tiny", "num_games": 8}


@pytest.fixture
def data(own_cache):
    """An imported corpus with two splits."""
    return write_corpus(own_cache / "index", PASSAGES, {"train": QUESTIONS, "test": QUESTIONS[1:]}, {})


@pytest.fixture
def play(data):
    """A function that takes actions in the first imported question, and returns the last answer of ``step``."""

    def play(*actions, **settings):
        env = SearchQAEnv(data=data, **settings)
        begin(env, 0)
        return [env.step(action) for action in actions][-1]

    return play


def test_it_works_without_any_data_and_passes_gymnasiums_checks(own_cache):
    assert SearchQAEnv(difficulty="tiny").split == "generated"
    check_env(SearchQAEnv(**TINY), skip_render_check=True)


def test_an_episode_with_imported_data(data):
    env = SearchQAEnv(data=data)
    assert [env.split, *env.tasks(), *env.tasks("test")] == ["train", "0", "1", "0"]
    observation, info = begin(env, "0")
    assert observation == "Question: Which colour have lamps?"
    assert info["task"] == "Which colour have lamps?"
    assert info["family"] == "nq"
    assert info["admissible_actions"] == ["search[<your query>]", "answer[<your answer>]"]
    for action, shown in {
        "search[red or blue chairs]": "[1] Chairs: Chairs are blue [or so].\n[2] Lamps: Lamps are red.",
        "search[zebra]": "No passage has any of these words.",
        f"So I search[{list(range(5000))}]": "No passage has any of these words.",
    }.items():
        assert env.step(action)[0] == shown
    for copied in (copy.deepcopy(env), env):
        *answer, info = copied.step("answer[An RED!]")
        assert answer == ["The answer is right.", 1.0, True, False]
        assert info["won"]
    assert env.walkthrough == ("answer[The red one]",)


@pytest.mark.parametrize(
    ("answer", "exact", "overlap"),
    [("red", 1, 1), ("a red thing", 0, 2 / 3), ("green", 0, 0), ("the", 0, 0), ("one red", 0, 1)],
)
def test_rewards(play, answer, exact, overlap):
    for reward, expected in (("exact_match", exact), ("f1", overlap)):
        observation, value, terminated, _, info = play(f"answer[{answer}]", reward=reward)
        assert (value, info["score"]) == pytest.approx((expected, overlap))
        assert terminated
        assert info["won"] == bool(exact)
        assert "red" not in observation  # the outcome must not contain the right answer


def test_the_last_turn_is_for_the_answer(play):
    assert play(*["search[lamps]"] * 4)[-1]["admissible_actions"] == ["answer[<your answer>]"]
    assert play(*["search[lamps]"] * 4, "answer[red]")[1:4] == (1.0, True, False)
    observation, *answer, info = play(*["search[lamps]"] * 5)
    assert answer == [0.0, False, True]
    assert info["invalid_action"]
    assert "Lamps" not in observation


@pytest.mark.parametrize(
    "action",
    [
        "",
        "search[]",
        "answer[ ]",
        "search lamps",
        "think[hm]",
        "search[x",
        "<search>x</search>",
        "\ud800",
        "search[" * 10**5,
    ],
    ids=lambda action: ascii(action[:20]),
)
def test_actions_that_are_not_understood_take_a_turn(play, action):
    _, *answer, info = play(action)
    assert answer == [0.0, False, False]
    assert info["invalid_action"]
    assert play(action, "answer[red]")[1] == 1.0


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        (
            "<think>so</think><search> lamps </search> <answer>x</answer>",
            "<information>Doc 1(Title: Lamps) Lamps are red.",
        ),
        ("</search><search>lamps\n</search>", "<information>Doc 1(Title: Lamps) Lamps are red."),
        ("<search><answer>red</answer>", "The answer is right."),
        ("search[lamps]", "This action is not possible now."),
        ("<search>" * 10**5, "This action is not possible now."),
    ],
    ids=lambda text: text[:30],
)
def test_tags_of_search_r1(play, action, shown):
    assert play(action, style="search_r1", top_k=1)[0].removesuffix("</information>") == shown


def test_a_concise_world_offers_the_names_on_display(own_cache):
    env = SearchQAEnv(**TINY)
    _, info = begin(env, 2)
    first, *rest = env.walkthrough
    assert info["admissible_actions"] == [first, first.replace("search", "answer")]
    for action in rest:
        assert action not in info["admissible_actions"]
        *_, info = env.step(first)
        assert action in info["admissible_actions"]
        first = action


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"split": "valid"}, errors.UnknownSplitError),
        ({"split": "train", "data": "/nowhere"}, errors.MissingDataError),
        *(({"families": families}, errors.GeneratorSettingError) for families in ([], ["two_hops"], "one_hop")),
        *(
            (wrong, errors.GeneratorSettingError)
            for wrong in (
                {"top_k": 0},
                {"num_worlds": 0},
                {"num_passages": 0},
                {"num_passages": 161},
                {"num_games": 2.0},
                {"difficulty": "x", "num_passages": 20},
            )
        ),
        *((wrong, ValueError) for wrong in ({"reward": "em"}, {"style": "xml"}, {"retriever": "localhost:1"})),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(data, settings, error):
    with pytest.raises(error):
        SearchQAEnv(**TINY | {"data": data} | settings)


def test_unknown_tasks_are_refused_and_numbers_of_numpy_are_not(data):
    for task in ("2", "abc", "", "٣", "9" * 5000, 2):
        with pytest.raises(errors.UnknownTaskError):
            begin(SearchQAEnv(data=data), task)
    numbers = ("num_games", "num_worlds", "generator_seed", "num_passages", "top_k")
    for settings in (dict.fromkeys(numbers, np.int64(20)), {"num_worlds": np.int64(2)}):
        SearchQAEnv(**TINY | settings).reset(seed=0)


def test_a_damaged_index_is_refused(data):
    (data / "questions-0.bin").write_bytes(b"")
    with pytest.raises(errors.CorruptCatalogueError):
        SearchQAEnv(data=data)

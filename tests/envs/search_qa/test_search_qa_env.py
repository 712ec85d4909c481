"""``trial/SearchQA-v0``: interface, limits, rewards, styles, tools, and bad input."""

import copy
import shutil

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import trial_envs
from trial_envs.errors import (
    CorruptCatalogueError,
    GeneratorSettingError,
    MissingDataError,
    UnknownSplitError,
    UnknownTaskError,
)
from trial_envs.search_qa.corpus import Question, write_corpus
from trial_envs.search_qa.env import SearchQAEnv
from trial_envs.search_qa.tool_env import SearchQAToolEnv
from trial_envs.search_qa.world import Passage

PASSAGES = [
    Passage("Lamps", "Lamps are red."),
    Passage("Chairs", "Chairs are blue [or so]."),
    Passage("Odd", "\ud800 x"),
]
QUESTIONS = [
    Question("Which colour have lamps?", ("The red one", "red"), "nq"),
    Question("And chairs?", ("blue",), "popqa"),
]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An imported corpus with two splits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "index", PASSAGES, {"train": QUESTIONS, "test": QUESTIONS[1:]}, {})


def test_it_works_without_any_data_and_passes_gymnasiums_checks(own_cache):
    trial_envs.register()
    env = gymnasium.make("trial/SearchQA-v0", difficulty="tiny", num_games=8)
    assert env.unwrapped.split == "generated"
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_an_episode_with_imported_data(data):
    env = SearchQAEnv(data=data)
    assert env.split == "train"
    assert [*env.tasks(), *env.tasks("test")] == ["0", "1", "0"]
    observation, info = env.reset(options={"task": "0"})
    assert observation == "Question: Which colour have lamps?"
    assert (info["task"], info["family"]) == ("Which colour have lamps?", "nq")
    assert info["admissible_actions"] == ["search[<your query>]", "answer[<your answer>]"]
    observation, *_, info = env.step("search[red or blue chairs]")
    assert observation == "[1] Chairs: Chairs are blue [or so].\n[2] Lamps: Lamps are red."
    assert env.step("search[zebra]")[0] == "No passage has any of these words."
    observation, reward, terminated, truncated, info = env.step("answer[An RED!]")
    assert (observation, reward, terminated, truncated) == ("The answer is right.", 1.0, True, False)
    assert info["won"]
    assert env.walkthrough == ("answer[The red one]",)


@pytest.mark.parametrize(
    ("answer", "exact", "overlap"),
    [("red", 1, 1), ("a red thing", 0, 2 / 3), ("green", 0, 0), ("the", 0, 0), ("one red", 0, 1)],
)
def test_rewards(data, answer, exact, overlap):
    for reward, expected in (("exact_match", exact), ("f1", overlap)):
        env = SearchQAEnv(data=data, reward=reward)
        env.reset(options={"task": 0})
        observation, got, terminated, _, info = env.step(f"answer[{answer}]")
        assert got == pytest.approx(expected)
        assert info["score"] == pytest.approx(overlap)
        assert (terminated, info["won"]) == (True, bool(exact))
        assert "red" not in observation  # the teacher's context must not contain the answer


def test_the_last_turn_is_for_the_answer(data):
    env = SearchQAEnv(data=data)
    for last, ended in (("answer[red]", (True, False)), ("search[lamps]", (False, True))):
        env.reset(options={"task": 0})
        for _ in range(4):
            observation, *_, info = env.step("search[lamps]")
            assert "Lamps" in observation
        assert info["admissible_actions"] == ["answer[<your answer>]"]
        observation, _, *done, info = env.step(last)
        assert tuple(done) == ended
        assert info["invalid_action"] == (last == "search[lamps]")
        assert "Lamps" not in observation


NONSENSE = [
    *(
        "",
        "search",
        "search[]",
        "answer[ ]",
        "search lamps",
        "think[hm]",
        "search[lamps",
        "x search[lamps]",
        "[" * 10**6,
    ),
    *("<search>lamps</search>", f"search[{list(range(5000))}]", "\x00\ud800"),
]


@pytest.mark.parametrize("action", NONSENSE, ids=lambda action: ascii(action[:20]))
def test_actions_that_are_not_understood_take_a_turn(data, action):
    env = SearchQAEnv(data=data)
    env.reset(options={"task": 0})
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["invalid_action"]) == (0.0, False, False, True)
    assert env.step("answer[red]")[1] == 1.0


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
def test_tags_of_search_r1(data, action, shown):
    env = SearchQAEnv(data=data, style="search_r1", top_k=1)
    _, info = env.reset(options={"task": 0})
    assert info["admissible_actions"] == ["<search><your query></search>", "<answer><your answer></answer>"]
    assert env.step(action)[0].removesuffix("</information>") == shown


def test_a_concise_world_offers_the_names_on_display(own_cache):
    env = SearchQAEnv("generated", difficulty="tiny", num_games=8)
    _, info = env.reset(options={"task": 2})
    first, *rest = env.walkthrough
    assert info["admissible_actions"] == [first, first.replace("search", "answer")]
    for action in rest:
        *_, info = env.step(first)
        assert action in info["admissible_actions"]
        first = action


def test_a_copy_continues_the_episode(data):
    env = SearchQAEnv(data=data)
    env.reset(options={"task": 0})
    env.step("search[lamps]")
    twin = copy.deepcopy(env)
    assert twin.step("answer[red]") == env.step("answer[red]")
    env.close()


def test_unknown_tasks_and_wrong_settings_are_refused(data):
    env = SearchQAEnv(data=data)
    for task in ("2", "abc", "", "٣", "9" * 5000, 2):
        with pytest.raises(UnknownTaskError):
            env.reset(options={"task": task})
    for split, expected in (("valid", UnknownSplitError), ("train", MissingDataError)):
        with pytest.raises(expected):
            SearchQAEnv(split, data=data if split == "valid" else data / "nowhere")
    with pytest.raises(MissingDataError, match="a split of generated worlds"):
        SearchQAEnv("train")
    wrong = [{"num_passages": 3}, {"num_games": 2.0}, {"generator_seed": True}, {"top_k": 0}, {"num_worlds": 0}]
    for settings in (*wrong, {"difficulty": "tiny", "num_passages": 161}, {"difficulty": "easy"}):
        with pytest.raises(GeneratorSettingError):
            SearchQAEnv("generated", **settings)
    for settings in (
        {"reward": "em"},
        {"style": "xml"},
        {"retriever": "localhost:1"},
        {"retriever": "http://h", "timeout_s": 0},
    ):
        with pytest.raises(ValueError, match="expected"):
            SearchQAEnv("generated", difficulty="tiny", **settings)
    numbers = {name: np.int64(20) for name in ("num_games", "num_worlds", "generator_seed", "num_passages", "top_k")}
    SearchQAEnv("generated", difficulty="tiny", **numbers).reset(seed=0)


@pytest.mark.parametrize("damage", [b"", b"\0" * 40])
def test_a_damaged_index_is_refused(data, damage, tmp_path):
    folder = shutil.copytree(data, tmp_path / "copy")
    (folder / "questions-train.bin").write_bytes(damage)
    with pytest.raises(CorruptCatalogueError):
        SearchQAEnv(data=folder)


def test_questions_are_answered_by_tool_calls(own_cache):
    env = SearchQAToolEnv(split="generated", difficulty="tiny", num_games=8)
    for task in range(8):
        assert env.reset(task=task).startswith("Question: ")
        for action in env._env.unwrapped.walkthrough:
            name, _, argument = action[:-1].partition("[")
            answer = getattr(env, name)(argument)
        assert answer == "The answer is right.\n\nThe episode is over."
        assert env.get_reward() == 1.0

"""Wrappers for text environments, checked on a small echo environment."""

import pickle

import gymnasium
import pytest
from echo_env import EchoEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from text_games import begin

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.chat import make_chat_env
from trial_envs.errors import CorruptTranscriptError, EpisodeOverError
from trial_envs.wrappers import ActionProjection, Episode, HistoryWindow, Recording, Step, append_episode, read_episodes


@pytest.fixture
def file(tmp_path):
    return tmp_path / "episodes.jsonl"


def test_the_history_contains_the_last_turns_of_the_episode():
    env = HistoryWindow(EchoEnv(), size=2)
    assert begin(env, 7)[1]["history"] == []
    for action in ("one", "two", "three"):
        observation, *_, info = env.step(action)
    assert observation == "one!\n> two\ntwo!\n> three\nthree!"
    assert info["history"] == [("one!", "two"), ("two!", "three")]
    assert begin(env, 8)[0] == "Ünïcode 8"
    for _ in range(3):
        assert env.step("é" * (env.action_space.max_length - 1))[0] in env.observation_space


@pytest.mark.parametrize(
    ("response", "action", "invalid"),
    [
        ("so</think><action> 7 </action>", "7", False),  # the prompt ended in <think>
        ("<action>WIN</action>", "win", True),
        ("", "", True),
    ],
)
def test_responses_become_actions_and_wrong_ones_are_flagged(response, action, invalid):
    env = ActionProjection(EchoEnv())
    _, info = begin(env, 7)
    assert info["action"] is None
    assert info["invalid_response"] is False
    observation, _, terminated, _, info = env.step(response)
    assert observation == f"{action}!"
    assert info["action"] == action
    assert info["invalid_response"] == invalid
    assert terminated == (action == "7")
    assert info["invalid_action"] == (action == "")


def test_actions_keep_their_case_if_the_environment_needs_it(monkeypatch):
    for keeps, action in ((True, "LOOK"), (False, "look")):
        monkeypatch.setattr(ALFWorldEnv, "keeps_case", keeps)
        env = make_chat_env("trial/ALFWorld-v0", split="generated", difficulty="tiny")
        env.reset()
        assert env.step("<think>so</think><action>LOOK</action>")[4]["action"] == action


def test_wrong_settings_are_refused_when_the_wrapper_is_made():
    with pytest.raises(ValueError, match="size"):
        HistoryWindow(EchoEnv(), size=0)
    with pytest.raises(TypeError):
        HistoryWindow(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="xml"):
        ActionProjection(EchoEnv(), style="xml")


def test_complete_and_interrupted_episodes_are_recorded(file):
    env = Recording(ActionProjection(gymnasium.make(EnvSpec("EchoEnv-v0", EchoEnv)), "plain"), file)
    env.reset(seed=3, options={"task": 7})
    answer = env.step(" 7 ")
    assert len(list(read_episodes(file))) == 1
    begin(env, 8)
    env.step("Ünï \ud800\x00\n")
    env.reset()
    env.close()
    won, unfinished = read_episodes(file)
    assert won.env == "EchoEnv-v0"
    assert won.seed == 3
    assert won.ended is True
    assert won.total_reward == 1.0
    assert won.steps[1] == Step(" 7 ", *answer)
    assert unfinished.seed is None
    assert unfinished.ended is False
    assert unfinished.total_reward == 0.0
    assert unfinished.steps[1].action == "Ünï \ud800\x00\n"


@pytest.mark.parametrize(("cut", "kept"), [(0.5, 1), (1, 2)])
def test_an_incomplete_last_line_is_replaced(file, cut, kept):
    episode = Episode("e", 1, (Step(None, "o" * 200_000, 0.0, False, False, {"n": 1}),))
    append_episode(file, episode)
    whole = file.read_bytes()
    file.write_bytes((whole + whole[: int(len(whole) * cut)]).rstrip())
    assert list(read_episodes(file)) == [episode] * kept
    append_episode(file, episode)
    assert file.read_bytes() == whole * (kept + 1)


@pytest.mark.parametrize("line", ["no JSON", "[]", "{}", '{"env": "e", "seed": 1, "steps": [{"action": 1}]}', "\x00"])
def test_a_line_without_an_episode_is_reported(file, line):
    append_episode(file, Episode("e", None, ()))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(CorruptTranscriptError, match="Line 2 of"):
        list(read_episodes(file))


def wrapped(file):
    return Recording(HistoryWindow(ActionProjection(EchoEnv(), "plain"), size=1), file)


def test_a_copy_of_wrapped_environments_is_independent(file):
    env = wrapped(file)
    begin(env, 7)
    env.step("one")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("two") == env.step("two")
    copy.step("7")
    with pytest.raises(EpisodeOverError):
        copy.step("three")
    assert env.step("three")[0] == "two!\n> three\nthree!"


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_accepts_wrapped_environments(file):
    check_env(wrapped(file), skip_render_check=True)

"""Wrappers for text environments, checked on a small echo environment."""

import pickle
from collections.abc import Sequence

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.chat import make_chat_env
from trial_envs.core import Outcome, TextEnv
from trial_envs.errors import CorruptTranscriptError, EpisodeOverError
from trial_envs.wrappers import ActionProjection, Episode, HistoryWindow, Recording, Step, append_episode, read_episodes


class EchoEnv(TextEnv):
    """The observation repeats the action; ``win`` wins."""

    def __init__(self, max_turns: int = 4, render_mode: str | None = None) -> None:
        super().__init__("echoes", max_turns, render_mode)

    def tasks(self, split: str | None = None) -> Sequence[str]:
        return ("hill", "valley", "cave")

    def family(self, task_id: str) -> str:
        return "echo"

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        return "say win", Outcome(f"a {task_id}", ("win",))

    def _advance(self, action: str) -> Outcome:
        won = action == "win"
        return Outcome(f"{action}!", ("win",), float(won), float(won), won, won, invalid_action=action == "")

    def _free(self) -> None:
        pass


@pytest.fixture(autouse=True)
def registered_echo_env():
    gymnasium.register("EchoEnv-v0", EchoEnv)
    yield
    del gymnasium.registry["EchoEnv-v0"]


def test_the_history_contains_the_last_turns_of_the_episode():
    env = HistoryWindow(EchoEnv(), size=2)
    observation, info = env.reset(options={"task": "hill"})
    assert (observation, info["history"]) == ("a hill", [])
    for action in ("one", "two", "three"):
        observation, *_, info = env.step(action)
        assert observation in env.observation_space
    assert observation == "one!\n> two\ntwo!\n> three\nthree!"
    assert info["history"] == [("one!", "two"), ("two!", "three")]
    assert env.reset(options={"task": "cave"})[0] == "a cave"
    longest = "é" * (env.action_space.max_length - 1)
    assert all(env.step(longest)[0] in env.observation_space for _ in range(3))


@pytest.mark.parametrize(
    ("response", "action", "invalid"),
    [
        ("<think>x</think><action> WIN </action>", "win", False),
        ("so</think><action>win</action>", "win", False),  # the prompt ended in <think>
        ("</think><think><action>win</action>", "win", False),
        ("<action>win</action>", "win", True),
        ("I say hello", "i say hello", True),
        ("", "", True),
        ("<think>\x00\ud800</think><action>\ud800</action>", "\ud800", False),
    ],
)
def test_responses_become_actions_and_wrong_ones_are_flagged(response, action, invalid):
    env = ActionProjection(EchoEnv())
    _, info = env.reset()
    assert (info["action"], info["invalid_response"]) == (None, False)
    observation, _, terminated, _, info = env.step(response)
    assert (observation, info["action"], info["invalid_response"]) == (f"{action}!", action, invalid)
    assert (terminated, info["invalid_action"]) == (action == "win", action == "")


def test_actions_keep_their_case_if_the_environment_needs_it(monkeypatch):
    for keeps, action in ((True, "LOOK"), (False, "look")):
        monkeypatch.setattr(ALFWorldEnv, "keeps_case", keeps)
        env = make_chat_env("trial/ALFWorld-v0", split="generated", difficulty="tiny")
        env.reset()
        assert env.step("<think>so</think><action>LOOK</action>")[4]["action"] == action
        env.close()


def test_wrong_settings_are_refused_when_the_wrapper_is_made():
    with pytest.raises(ValueError, match="size is 0"):
        HistoryWindow(EchoEnv(), size=0)
    with pytest.raises(TypeError, match="Expected Text spaces"):
        HistoryWindow(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="style"):
        ActionProjection(EchoEnv(), style="xml")
    with pytest.raises(TypeError, match="got bytes"):
        ActionProjection(EchoEnv()).step(b"win")


def test_complete_and_interrupted_episodes_are_recorded(tmp_path):
    file = tmp_path / "episodes.jsonl"
    env = Recording(ActionProjection(gymnasium.make("EchoEnv-v0"), "plain"), file)
    env.reset(seed=3, options={"task": "hill"})
    answer = env.step(" win ")
    assert len(list(read_episodes(file))) == 1
    env.reset(options={"task": "cave"})
    env.step("Ünï \ud800\x00\n")
    env.reset()
    env.close()
    won, unfinished = read_episodes(file)
    assert (won.env, won.seed, won.ended, won.total_reward) == ("EchoEnv-v0", 3, True, 1.0)
    assert won.steps[1] == Step(" win ", *answer)
    assert (unfinished.seed, unfinished.ended, unfinished.total_reward) == (None, False, 0.0)
    assert unfinished.steps[1].action == "Ünï \ud800\x00\n"


@pytest.mark.parametrize(("cut", "kept"), [(0.5, 1), (1, 2)], ids=["incomplete", "whole"])
def test_an_incomplete_last_line_is_replaced(tmp_path, cut, kept):
    file = tmp_path / "episodes.jsonl"
    episode = Episode("e", 1, (Step(None, "o" * 200_000, 0.0, False, False, {"n": 1}),))
    append_episode(file, episode)
    whole = file.read_bytes()
    file.write_bytes((whole + whole[: int(len(whole) * cut)]).rstrip())
    assert list(read_episodes(file)) == [episode] * kept
    append_episode(file, episode)
    assert file.read_bytes() == whole * (kept + 1)


@pytest.mark.parametrize("line", ["no JSON", "[]", "{}", '{"env": "e", "seed": 1, "steps": [{"action": 1}]}', "\x00"])
def test_a_line_without_an_episode_is_reported(tmp_path, line):
    file = tmp_path / "episodes.jsonl"
    append_episode(file, Episode("e", None, ()))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(CorruptTranscriptError, match="Line 2 of"):
        list(read_episodes(file))


def wrapped(env, file):
    return Recording(HistoryWindow(ActionProjection(env, "plain"), size=1), file)


def test_a_copy_of_wrapped_environments_is_independent(tmp_path):
    env = wrapped(EchoEnv(), tmp_path / "e.jsonl")
    env.reset(seed=1)
    env.step("one")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.step("two") == env.step("two")
    copy.step("win")
    with pytest.raises(EpisodeOverError):
        copy.step("three")
    assert env.step("three")[0] == "two!\n> three\nthree!"
    assert copy.reset() == env.reset()


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_accepts_wrapped_environments(tmp_path):
    check_env(wrapped(EchoEnv(), tmp_path / "e.jsonl"), skip_render_check=True)

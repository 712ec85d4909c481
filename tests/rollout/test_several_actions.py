"""A response with several tool calls is one turn, in which each call is a step of the environment."""

import asyncio
from contextlib import closing

import pytest
from echo_env import EchoEnv
from user_env import entry_of

from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.prompts.writer import records
from trial_ray.rollout.episode import play_episode
from trial_ray.trajectory import Trajectory, TrajectoryGroup, Turn


class Echo(EchoEnv):
    ENV_ID = "mine/Echo-v0"


def play(*turns, max_turns=6):
    class Scripted:
        async def act(self, result, history, step):
            return turns[step - 1] if step <= len(turns) else None

    with closing(GuardedEnv(entry_of(Echo, max_turns=max_turns))) as env:
        return asyncio.run(play_episode(env, "7", Scripted()))


def several(*actions, mistake=""):
    """A turn with these actions; an empty text is a call that is answered with ``mistake``."""
    answers = tuple("" if action else mistake for action in actions)
    return Turn(action="\n".join(filter(None, actions)), actions=actions, answers=answers)


def test_the_calls_of_a_response_are_steps_of_one_turn():
    episode = play(several("1", "", "2", mistake="No such tool."), Turn(action="7"))
    first, last = episode.turns
    assert (first.answers, first.outcome) == (("1!", "No such tool.", "2!"), "1!\n\nNo such tool.\n\n2!")
    assert (first.reward, first.invalid_action, last.observation, last.answers) == (0.0, True, "2!", ())
    assert (episode.success, episode.episode_return) == (True, 1.0)
    assert records(episode.turns) == [("Ünïcode 7", "1"), ("1!", ""), ("No such tool.", "2"), ("2!", "7")]


@pytest.mark.parametrize(
    ("actions", "max_turns", "answered", "success"),
    [(("1", "7", "2"), 6, ("1!", "7!"), True), (("1", "2", "3", "4", "5"), 3, ("1!", "2!", "3!"), False)],
)
def test_calls_after_the_end_of_the_episode_are_not_carried_out(actions, max_turns, answered, success):
    """The end is the environment's, or the limit on turns, which counts steps."""
    episode = play(several(*actions), several("7"), max_turns=max_turns)
    (turn,) = episode.turns
    assert (turn.answers, turn.reward, episode.success) == (answered, float(success), success)
    assert episode.ended == ("terminated" if success else "turn_limit")
    failed = Trajectory("7", "", 0, [turn])
    if success:
        assert TrajectoryGroup("7", [failed, episode]).peer_actions(failed) == ("1", "7")

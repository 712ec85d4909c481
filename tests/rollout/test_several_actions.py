"""A response with several tool calls is one turn, in which each call is a step of the environment."""

import asyncio
from contextlib import closing

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


def test_calls_after_the_end_of_the_episode_are_not_carried_out():
    """The end is the environment's, or the limit on turns, which counts steps."""
    won = play(several("1", "7", "2"), several("7"))
    (turn,) = won.turns
    assert (turn.answers, turn.reward, won.success, won.ended) == (("1!", "7!"), 1.0, True, "terminated")
    failed = Trajectory("7", "", 0, [turn])
    assert TrajectoryGroup("7", [failed, won]).peer_actions(failed) == ("1", "7")
    cut = play(several(*"12345"), several("7"), max_turns=3)
    (turn,) = cut.turns
    assert (turn.answers, turn.reward, cut.success, cut.ended) == (("1!", "2!", "3!"), 0.0, False, "turn_limit")

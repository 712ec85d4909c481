"""Scripted policies win, and the planner counts the remaining commands of the solution."""

import pytest
from text_games import play_expert

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.families import FAMILIES
from trial_envs.alfworld.oracle import ExplorerOracle, ForgetfulExplorer, ParsedTask, read_task


@pytest.mark.parametrize(("level", "games", "turns"), [("tiny", 30, 8), ("small", 18, 12), ("medium", 18, 20)])
def test_the_explorer_wins_generated_games_in_few_turns(level, games, turns):
    env = ALFWorldEnv("generated", difficulty=level, num_games=games, generator_seed=21, families=FAMILIES)
    played = play_expert(env, ExplorerOracle)
    assert sum(info["won"] for info, _ in played) >= games - 1
    assert sum(len(actions) for _, actions in played) / games < turns


def test_the_forgetful_explorer_wins_and_plans_by_the_current_state():
    """Its options are those of another expert that starts in the current state."""
    treated = set()

    def check(expert, observation, info, options):
        if not (expert in treated or expert._carried):
            fresh = ForgetfulExplorer()
            fresh.reset(info["task"], observation, 0)
            assert fresh.options(observation, info["admissible_actions"]) == options
        if expert._last.startswith(("clean", "heat", "cool")):
            treated.add(expert)

    env = ALFWorldEnv("generated", num_games=18, max_turns=30, generator_seed=21)
    assert sum(info["won"] for info, _ in play_expert(env, ForgetfulExplorer, check)) >= 15


def test_task_sentences_are_read():
    for sentence, errand in {
        "put some saltshaker on cabinet.": ParsedTask("saltshaker", "cabinet"),
        "Your task is to: put a alarmclock in desk.": ParsedTask("alarmclock", "desk"),
        "find two pen and put them in drawer.": ParsedTask("pen", "drawer"),
        "put two pen in drawer.": ParsedTask("pen", "drawer"),
        "put a hot egg in fridge.": ParsedTask("egg", "fridge", "heat"),
        "cool some pan and put it in stoveburner.": ParsedTask("pan", "stoveburner", "cool"),
        "look at book under the desklamp.": ParsedTask("book", "desklamp", lamp=True),
        "examine the mug with the desklamp.": ParsedTask("mug", "desklamp", lamp=True),
        "sing a song.": None,
    }.items():
        assert read_task(sentence) == errand

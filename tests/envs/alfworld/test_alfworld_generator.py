"""Generated ALFWorld games: a pure function of the id, winnable in all six families, of the size of their level."""

from collections import Counter
from dataclasses import replace

import pytest

from trial_envs.alfworld.engine import AlfredEngine
from trial_envs.alfworld.export import check_solution
from trial_envs.alfworld.families import FAMILIES, parse_name
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.errors import CorruptGameError, GeneratorSettingError


@pytest.mark.parametrize(("level", "count"), [("tiny", 12), ("small", 18), ("medium", 18), ("official", 6)])
def test_every_game_is_won_by_its_walkthrough_and_not_before(level, count):
    ids = task_ids(level, seed=11, count=count, families=FAMILIES)
    assert Counter(parse_name(i.split("/")[0]).family for i in ids) == dict.fromkeys(FAMILIES, count // 6)
    engine = AlfredEngine()
    for task_id in ids:
        check_solution(engine, generate(task_id))


def test_the_check_refuses_a_walkthrough_that_does_not_win():
    game = generate(task_ids("tiny", 0, 1)[0])
    for broken, reason in (
        (game.walkthrough[:-1], "not won"),
        (("go to moon 1", *game.walkthrough), "not admissible"),
        ((*game.walkthrough, "look"), "won before"),
    ):
        with pytest.raises(CorruptGameError, match=reason):
            check_solution(AlfredEngine(), replace(game, walkthrough=broken))


def test_seeds_and_indices_give_different_games():
    assert task_ids("small", 0, 40)[:10] == task_ids("small", 0, 10)
    assert len({generate(i).text.problem for seed in (0, 1) for i in task_ids("small", seed, 20)}) == 40


def test_unknown_settings_are_refused():
    for wrong in ({"difficulty": "hard"}, {"families": ("juggle",)}, {"families": ()}, {"seed": True}, {"count": 0}):
        with pytest.raises(GeneratorSettingError, match=r"[Ee]xpected"):
            task_ids(**({"difficulty": "tiny", "seed": 0, "count": 3} | wrong))

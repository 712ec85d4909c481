"""Vector environments, forks, copies and bad input: typed errors or "Nothing happens.", never a crash of the process."""

import gymnasium
import pytest

import trial_envs  # noqa: F401  registers the ids
from trial_envs.alfworld.engine import AlfredEngine, GameText
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.export import write_games
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.errors import CorruptGameError, EpisodeOverError, UnknownTaskError

TINY = {"split": "generated", "difficulty": "tiny"}


def test_vector_environments_answer_as_single_ones():
    envs = gymnasium.make_vec("trial/ALFWorld-v0", num_envs=2, vectorization_mode="async", **TINY)
    observations, infos = envs.reset(seed=5)
    alone = [ALFWorldEnv(**TINY).reset(seed=seed) for seed in (5, 6)]
    assert [*zip(observations, infos["task_id"], strict=True)] == [(text, info["task_id"]) for text, info in alone]
    observations, *_, infos = envs.step(("look", "fly"))
    assert observations[1] == "Nothing happens."
    assert [*infos["invalid_action"]] == [False, True]
    envs.close()


@pytest.mark.parametrize("task", ["x" * 1_000_000, "../.."])
def test_unknown_tasks_of_every_source(tmp_path, task):
    write_games(tmp_path / "tree", n=1, seed=0, difficulty="tiny")
    for source in (ALFWorldEnv(**TINY), ALFWorldEnv("train", data=tmp_path / "tree")):
        with pytest.raises(UnknownTaskError) as caught:
            source.reset(options={"task": task})
        assert len(str(caught.value)) < 1000
        with pytest.raises(EpisodeOverError):
            source.step("look")
        source.reset(seed=0)


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        ("problem", "(:init", "(:init\x00"),
        ("problem", "loc_bar_1)", "loc_bär_1)"),
        ("problem", "agent1", "\ud800"),
        ("problem", "(:goal", "(" * 5000),
        ("grammar", '"-= Welcome', '"#intro#-= Welcome'),
        ("grammar", '"task": [', '"goal": ['),
        ("grammar", "{o.indefinite", "{o..indefinite"),
        ("grammar", "receptacleatlocation(r:receptacle, l", "receptacleatlocation(r:receptacle, m:location, l"),
        ("domain", "GotoLocation", "Fly"),
        ("domain", "(:action", "(:"),
    ],
)
def test_no_damage_of_a_game_ends_the_process(part, old, new):
    game = generate(task_ids("tiny", 5, 1)[0])
    damaged = GameText(**game.text.__dict__ | {part: getattr(game.text, part).replace(old, new)})
    assert damaged != game.text
    engine = AlfredEngine()

    def start(text):
        engine.load(text)
        return engine.reset()

    with pytest.raises(CorruptGameError):
        start(damaged)
    assert start(game.text).admissible_commands

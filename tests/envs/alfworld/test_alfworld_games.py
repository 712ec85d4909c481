"""The sources of ALFWorld games, and the errors for missing or damaged ones."""

import json
import lzma
import shutil

import gymnasium
import pytest
from packed_games import pack_games

import trial_envs  # noqa: F401  registers the ids
from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.export import write_games
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.errors import (
    CorruptGameError,
    MissingDataError,
    UnknownSplitError,
    UnknownTaskError,
)


def make(**settings):
    return gymnasium.make("trial/ALFWorld-v0", disable_env_checker=True, **settings)


@pytest.fixture(autouse=True)
def no_user_data(monkeypatch, tmp_path):
    """Hides the user's games and the user's cache."""
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "games"
    ids = write_games(folder, n=3, seed=4, difficulty="tiny", split="valid_seen")
    return folder, ids


def win(env) -> dict:
    for command in env.unwrapped.walkthrough:
        _, reward, terminated, _, info = env.step(command)
    assert (reward, terminated) == (1.0, True)
    return info


def test_a_tree_and_a_packed_release_play_the_generated_games(tree, tmp_path):
    folder, ids = tree
    answers = []
    pack = pack_games(tmp_path / "packed", map(generate, ids), split="valid_seen")
    sources = ({"split": "valid_seen", "data": folder}, {"split": "valid_seen", "data": folder / "json_2.1.1"})
    generated = {"split": "generated", "difficulty": "tiny", "generator_seed": 4, "num_games": 3}
    for settings in (*sources, {"split": "valid_seen", "data": pack}, generated):
        env = make(**settings)
        assert sorted(env.unwrapped.tasks()) == sorted(ids)
        observation, info = env.reset(options={"task": ids[1]})
        assert info["task_id"] == ids[1]
        answers.append((observation, info, win(env)))
        env.close()
    assert all(answer == answers[0] for answer in answers)


def test_lists_are_sorted_and_the_environment_variable_points_to_the_data(tree, monkeypatch):
    folder, ids = tree
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    env = make(split="valid_seen")
    assert list(env.unwrapped.tasks()) == sorted(ids)
    assert list(env.unwrapped.tasks("valid_seen")) == sorted(ids)
    assert len(env.unwrapped.tasks("generated")) == 256
    env.close()


def test_trees_hold_more_than_the_games_that_are_played(tree, tmp_path):
    folder, _ = tree
    split = tmp_path / "json_2.1.1" / "train"
    game = next(folder.rglob("game.tw-pddl")).read_text()
    for name, content in {
        "pick_and_place_simple-Mug-None-Desk-301/trial_1": game,
        "pick_and_place_simple-Mug-None-Desk-301/trial_2": game.replace('"solvable": true', '"solvable": false'),
        "pick_and_place_with_movable_recep-Mug-Bowl-Desk-301/trial_3": game,
        "pick_and_place_simple-AppleSliced-None-Fridge-1/trial_4": game,
    }.items():
        (split / name).mkdir(parents=True)
        (split / name / "game.tw-pddl").write_text(content)
    (split / "pick_and_place_simple-Mug-None-Desk-301/trial_5").mkdir()
    env = make(split="train", data=tmp_path)
    assert list(env.unwrapped.tasks()) == ["pick_and_place_simple-Mug-None-Desk-301/trial_1"]
    env.close()


def test_a_tree_is_listed_again_after_a_change_of_the_folder_and_of_the_tree(tree, tmp_path, monkeypatch):
    folder, ids = tree
    for place, number in (("one", 1), ("two", 2)):
        write_games(tmp_path / place / "games", n=number, seed=4, difficulty="tiny", split="valid_seen")
    listed = []
    for place in ("one", "two"):
        monkeypatch.chdir(tmp_path / place)
        env = make(split="valid_seen", data="games")
        monkeypatch.chdir(tmp_path)
        env.reset()
        listed.append(len(env.unwrapped.tasks()))
        env.close()
    shutil.rmtree(tmp_path / "one" / "games")
    shutil.copytree(folder, tmp_path / "one" / "games")
    env = make(split="valid_seen", data=tmp_path / "one" / "games")
    assert [*listed, len(env.unwrapped.tasks())] == [1, 2, len(ids)]
    env.close()


def test_without_data_the_message_says_how_to_get_them():
    with pytest.raises(UnknownSplitError, match=r"'test'.*valid_seen"):
        make(split="test")
    for settings in ({}, {"data": "/nowhere/games"}):
        with pytest.raises(MissingDataError) as caught:
            make(split="valid_seen", **settings)
        for help_word in ("ALFWORLD_DATA", "alfworld-download", "split='generated'"):
            assert help_word in str(caught.value)


def test_an_empty_folder_and_a_tree_without_the_split_are_missing_data(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingDataError, match="has no games"):
        make(split="train", data=tmp_path / "empty")
    with pytest.raises(MissingDataError, match="has no split 'valid_unseen'"):
        make(split="valid_unseen", data=tree[0])


def test_a_packed_release_without_its_grammar_is_missing_data(tmp_path):
    folder = pack_games(tmp_path / "packed", [])
    (folder / "grammar.twl2.tmpl").unlink()
    with pytest.raises(MissingDataError, match=r"grammar\.twl2\.tmpl"):
        make(split="train", data=folder)


@pytest.mark.parametrize("damage", ["cut off", "not JSON"])
def test_a_broken_packed_release_is_reported_and_leaves_no_index(tmp_path, damage):
    folder = pack_games(tmp_path / "packed", map(generate, task_ids("tiny", 0, 5)))
    file = folder / "games_all.jsonl.xz"
    file.write_bytes(file.read_bytes()[:-40] if damage == "cut off" else lzma.compress(b"{\n"))
    with pytest.raises(CorruptGameError, match=r"games_all\.jsonl\.xz"):
        make(split="train", data=folder)
    assert list((tmp_path / "cache" / "trial_envs").iterdir()) == []


def test_a_machine_without_a_writable_cache_plays_packed_games_too(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the cache folder should be")
    ids = task_ids("tiny", 0, 2)
    env = make(split="train", data=pack_games(tmp_path / "packed", map(generate, ids)))
    env.reset(options={"task": ids[0]})
    win(env)
    env.close()


@pytest.mark.parametrize("task", ["pick_and_place_simple-Mug-None-Desk-301/trial_1", "", "a/../b", "../outside"])
def test_an_unknown_task_of_a_tree(tree, task, tmp_path):
    folder = tmp_path / "json_2.1.1"
    for split in ("train", "outside"):
        (folder / split).mkdir(parents=True)
    (folder / "outside" / "game.tw-pddl").write_text(next(tree[0].rglob("game.tw-pddl")).read_text())
    env = make(split="train", data=tmp_path)
    with pytest.raises(UnknownTaskError):
        env.reset(options={"task": task})
    env.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda text: "[]", "lacks pddl_domain"),
        (lambda text: json.dumps(json.loads(text) | {"grammar": 7}), "lacks grammar"),
        (lambda text: text.replace("(:goal", "(:gaol"), "translated"),
        (lambda text: text.replace("(:domain alfred)", "(:domain chess)"), "chess"),
        (lambda text: json.dumps(json.loads(text) | {"grammar": "grammar :: nonsense"}), "task"),
        (lambda text: text.replace("{o.indefinite + ' '", "{open('/etc/passwd').read() + ' '"), "only names"),
    ],
)
def test_a_corrupt_game_is_reported_and_the_environment_plays_on(tmp_path, damage, reason):
    folder = tmp_path / "games"
    good, bad = sorted(write_games(folder, n=2, seed=4, difficulty="tiny"))
    file = folder / "json_2.1.1" / "train" / bad / "game.tw-pddl"
    file.write_text(damage(file.read_text()))
    env = make(split="train", data=folder)
    for _ in range(2):
        with pytest.raises(CorruptGameError, match=reason):
            env.reset(options={"task": bad})
    env.reset(options={"task": good})
    win(env)
    env.close()


def test_without_data_and_split_games_are_generated(tmp_path):
    env = ALFWorldEnv()
    assert env.split == "generated"
    env.close()
    with pytest.raises(MissingDataError, match="nowhere"):
        ALFWorldEnv(data=tmp_path / "nowhere")

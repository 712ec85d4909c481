"""The sources of ALFWorld games, and the errors for missing or damaged ones."""

import lzma
import shutil

import pytest
from packed_games import pack_games
from text_games import begin, win

from trial_envs.alfworld.env import ALFWorldEnv
from trial_envs.alfworld.export import write_games
from trial_envs.alfworld.games import find_data
from trial_envs.alfworld.generator import generate, task_ids
from trial_envs.errors import CorruptGameError, MissingDataError, UnknownSplitError


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    """A default folder of games and a cache for each test alone."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "games"
    return folder, write_games(folder, n=3, seed=4, difficulty="tiny", split="valid_seen")


def test_a_tree_and_a_packed_release_play_the_generated_games(tree, tmp_path):
    folder, ids = tree
    answers = []
    pack = pack_games(tmp_path / "packed", map(generate, ids), split="valid_seen")
    environments = [ALFWorldEnv("valid_seen", data) for data in (folder, folder / "json_2.1.1", pack)]
    for env in (*environments, ALFWorldEnv("generated", difficulty="tiny", generator_seed=4, num_games=3)):
        assert sorted(env.tasks()) == sorted(ids)
        answers.append((begin(env, ids[1]), win(env, ids[1])))
    assert answers == answers[:1] * 4


def test_the_environment_variable_points_to_the_data(tree, monkeypatch):
    folder, ids = tree
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    env = ALFWorldEnv("generated")
    assert list(env.tasks("valid_seen")) == sorted(ids)
    assert len(env.tasks()) == 256


def test_missing_data_are_reported_with_the_remedy():
    with pytest.raises(UnknownSplitError, match=r"'test'.*valid_seen"):
        ALFWorldEnv("test")
    for data in (None, "/nowhere/games"):
        with pytest.raises(MissingDataError, match=r"alfworld-download.*ALFWORLD_DATA.*split='generated'"):
            ALFWorldEnv("valid_seen", data)


@pytest.mark.parametrize("damage", ["cut off", "not JSON"])
def test_a_broken_packed_release_leaves_no_index(tmp_path, damage):
    folder = pack_games(tmp_path / "packed", map(generate, task_ids("tiny", 0, 5)))
    file = folder / "games_all.jsonl.xz"
    file.write_bytes(file.read_bytes()[:-40] if damage == "cut off" else lzma.compress(b"{\n"))
    with pytest.raises(CorruptGameError, match=r"games_all\.jsonl\.xz"):
        ALFWorldEnv("train", folder)
    assert list((tmp_path / ".cache/trial_envs").iterdir()) == []


@pytest.mark.parametrize("inside", ["", "json_2.1.1"])
def test_games_in_the_default_folder_are_found(tree, tmp_path, inside):
    default = tmp_path / ".cache/alfworld"
    shutil.copytree(tree[0], default / inside)
    assert find_data(None) == default


def test_without_data_and_split_games_are_generated(tmp_path, monkeypatch):
    # As the package alfworld sets it when it is imported.
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / ".cache/alfworld"))
    assert ALFWorldEnv().split == "generated"
    with pytest.raises(MissingDataError, match="nowhere"):
        ALFWorldEnv(data=tmp_path / "nowhere")

"""``trial/WebShop-v0``: interface, splits, rules of a session, and bad input."""

import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env
from text_games import begin, win
from webshop_source import NOUNS, write_source

from trial_envs.errors import (
    CorruptCatalogueError,
    GeneratorSettingError,
    MissingDataError,
    UnknownSplitError,
    UnknownTaskError,
)
from trial_envs.text_index.folder import MANIFEST
from trial_envs.webshop import shops
from trial_envs.webshop.actions import parse_action
from trial_envs.webshop.env import WebShopEnv


@pytest.fixture
def env():
    return WebShopEnv("generated", num_products=60, num_games=40)


def test_it_works_without_any_data_and_passes_gymnasiums_checks(own_cache):
    env = WebShopEnv()
    assert env.split == "generated"
    check_env(env, skip_render_check=True)


def test_splits_of_both_conventions(shop_folder):
    shop = WebShopEnv("all", data=shop_folder)
    goals = shop.catalogue.num_goals
    assert goals > 1500
    for name, numbers in {
        "train": range(500, goals),
        "test": range(500),
        "orig_train": range(1500, goals),
        "orig_eval": range(500, 1500),
        "orig_test": range(500),
        "all": range(goals),
    }.items():
        assert list(shop.tasks(name)) == list(map(str, numbers))
    with pytest.raises(UnknownSplitError, match="orig_eval"):
        shop.tasks("valid")


def test_options_are_kept_on_sub_pages_only(env):
    """A goal with a colour and a size, whose product is opened, left and bought."""
    shop = env.catalogue
    task = next(task for task in env.tasks() if shop.goal(int(task)).wanted.keys() == {"color", "size"})
    found = shop.product(shop.position(shop.goal(int(task)).asin))
    search, product = f"search[{found.title}]", f"click[{found.asin.lower()}]"
    (first, second, *_), colour = found.options["size"], found.options["color"][0]
    for detour, kept in {
        ("click[features]", "click[< prev]", "click[reviews]", "click[< prev]"): {"size": second},
        (f"click[{first}]", f"click[{colour}]"): {"size": first, "color": colour},
        ("click[< prev]", product): {},
        (search, product): {},
    }.items():
        begin(env, task)
        for action in (search, product, f"click[{second}]", *detour, "click[buy now]"):
            env.step(action)
        assert env.purchase.options == kept, detour


@pytest.mark.parametrize(
    "action",
    [
        "",
        "Search[red shirt]",
        "click[buy now]",
        "click[x [y]]",
        "search[<r>]",
        "search[<a> x]",
        "search[<c>]",
        "think[hm]",
        "[" * 10**6,
        "click[" * 10**5,
        "\x00\x1b[31m\ud800",
        f"search[{list(range(5000))}]",
    ],
    ids=lambda action: ascii(action[:20]),
)
def test_what_is_not_understood_changes_nothing(env, action):
    before, first = begin(env, 1)
    *answer, info = env.step(action)
    assert answer == [before, 0.0, False, False]
    assert info["invalid_action"]
    assert info["admissible_actions"] == first["admissible_actions"]


def test_actions_are_read_as_the_published_pattern_reads_them():
    for length in range(6):
        for letters in itertools.product("aB[]\n", repeat=length):
            text = "".join(letters)
            match = re.match(r"(.+)\[(.+)\]", text)
            assert parse_action(text) == ((match[1], match[2].lower()) if match else (text, ""))


def test_unknown_tasks_and_wrong_settings_are_refused(own_cache, env):
    with pytest.raises(UnknownTaskError):
        begin(env, "40")
    with pytest.raises(UnknownSplitError):
        WebShopEnv("valid")
    for wrong in (
        {"num_products": 0},
        {"num_games": 2.0},
        {"generator_seed": True},
        {"num_shops": 0},
        {"num_games": 0},
    ):
        with pytest.raises(GeneratorSettingError, match="as a whole number from"):
            WebShopEnv("generated", **wrong)
    for data, told in ((None, "WEBSHOP_DATA"), (own_cache / "nowhere", "nowhere")):
        with pytest.raises(MissingDataError, match=told):
            WebShopEnv("train", data=data)


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        ("products.bin", Path.unlink, CorruptCatalogueError),
        ("products.bin", lambda path: os.truncate(path, 100), CorruptCatalogueError),
        ("products.bin", lambda path: path.write_bytes(bytes(path.stat().st_size)), CorruptCatalogueError),
        (MANIFEST, Path.unlink, MissingDataError),
        (MANIFEST, lambda path: os.truncate(path, 100), CorruptCatalogueError),
    ],
)
def test_a_damaged_index_is_refused(own_shop, tmp_path, name, damage, error):
    damage(shutil.copytree(own_shop, tmp_path / "index") / name)
    with pytest.raises(error):
        WebShopEnv("all", data=tmp_path / "index")


@pytest.mark.parametrize("is_file", [False, True])
def test_what_is_not_an_index_in_place_of_a_generated_shop_is_refused(own_cache, is_file):
    folder = WebShopEnv("generated", difficulty="tiny", generator_seed=99).catalogue.folder
    (folder / MANIFEST).unlink()
    if is_file:
        shutil.rmtree(folder)
        folder.touch()
    with pytest.raises(CorruptCatalogueError, match=r"exists and is not an index\. Delete it"):
        WebShopEnv("generated", difficulty="tiny", generator_seed=99)


def test_a_source_folder_is_prepared_once(own_cache, tmp_path, monkeypatch):
    folder = write_source(tmp_path / "data", title_nouns=NOUNS)
    with monkeypatch.context() as patch:
        patch.setattr(shops, "PREPARED_ON_SIGHT", 1000)  # large data are imported by the user
        with pytest.raises(MissingDataError, match="import_shop"):
            WebShopEnv("test", data=folder)
    env = WebShopEnv("test", data=folder)
    prepared = env.catalogue.folder
    assert WebShopEnv("test", data=folder).catalogue is env.catalogue
    shutil.rmtree(folder)
    shutil.rmtree(prepared)
    win(env)
    with pytest.raises(MissingDataError):
        WebShopEnv("test", data=folder)

"""``trial/WebShop-v0``: interface, splits, rules of a session, and bad input."""

import itertools
import re
import shutil

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from text_games import win
from webshop_source import NOUNS, write_source

import trial_envs
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


@pytest.fixture(scope="module", autouse=True)
def module_cache(tmp_path_factory):
    """A cache folder for this module, in which the shop of ``env`` is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def env():
    env = WebShopEnv("generated", num_products=60, num_games=40)
    yield env
    env.close()


@pytest.fixture
def shop(shop_folder):
    """An environment in the shop of the own recordings, and in the published one."""
    env = WebShopEnv("all", data=shop_folder)
    yield env
    env.close()


def test_it_works_without_any_data_and_passes_gymnasiums_checks(own_cache):
    trial_envs.register()
    env = gymnasium.make("trial/WebShop-v0")
    assert env.unwrapped.split == "generated"
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_splits_of_both_conventions(shop):
    goals = shop.catalogue.num_goals
    assert goals > 1500
    splits = {"test": (0, 500), "train": (500, goals), "orig_test": (0, 500), "orig_eval": (500, 1500)}
    splits |= {"orig_train": (1500, goals), "all": (0, goals)}
    for name, (first, end) in splits.items():
        assert list(shop.tasks(name)) == list(map(str, range(first, end)))
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
        env.reset(options={"task": task})
        for action in (search, product, f"click[{second}]", *detour, "click[buy now]"):
            env.step(action)
        assert env.purchase.options == kept, detour


NONSENSE = [
    *("", "Search[red shirt]", "click[buy now]", "click[x [y]]", "search[<r>]", "search[<a> x]", "search[<c>]"),
    *("think[hm]", "[" * 10**6, "click[" * 10**5, "\x00\x1b[31m\ud800", f"search[{list(range(5000))}]"),
]


@pytest.mark.parametrize("action", NONSENSE, ids=lambda action: ascii(action[:20]))
def test_what_is_not_understood_changes_nothing(env, action):
    before, first = env.reset(options={"task": 1})
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation, reward, terminated, truncated) == (before, 0.0, False, False)
    assert info["invalid_action"]
    assert info["admissible_actions"] == first["admissible_actions"]


def test_actions_are_read_as_the_published_pattern_reads_them():
    for length in range(6):
        for letters in itertools.product("aB[]\n", repeat=length):
            text = "".join(letters)
            match = re.match(r"(.+)\[(.+)\]", text)
            assert parse_action(text) == ((match[1], match[2].lower()) if match else (text, "")), text


def test_unknown_tasks_and_wrong_settings_are_refused(own_cache, env):
    for task in ("40", "abc", "", "٣", "9" * 5000):
        with pytest.raises(UnknownTaskError):
            env.reset(options={"task": task})
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
    with pytest.raises(MissingDataError, match="WEBSHOP_DATA"):
        WebShopEnv("train")
    with pytest.raises(MissingDataError, match="nowhere"):
        WebShopEnv("train", data=own_cache / "nowhere")


@pytest.mark.parametrize(
    ("name", "damage", "error"),
    [
        ("products.bin", "missing", CorruptCatalogueError),
        ("products.bin", "short", CorruptCatalogueError),
        ("products.bin", "changed", CorruptCatalogueError),
        (MANIFEST, "missing", MissingDataError),
        (MANIFEST, "short", CorruptCatalogueError),
    ],
)
def test_a_damaged_index_is_refused(own_shop, tmp_path, name, damage, error):
    path = shutil.copytree(own_shop, tmp_path / "index") / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "short" else b"\0" * len(content))
    with pytest.raises(error):
        WebShopEnv("all", data=tmp_path / "index")


def test_a_generated_shop_that_was_deleted_in_part_is_refused(own_cache):
    (WebShopEnv("generated", difficulty="tiny", generator_seed=99).catalogue.folder / MANIFEST).unlink()
    with pytest.raises(CorruptCatalogueError, match=r"has files and no .* Delete the index folder"):
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

"""``trial/WebShop-v0``: the contract, splits, rules of a session, and what it does with bad input."""

import shutil
import subprocess
import sys
import threading

import gymnasium
import pytest
from conftest import WEBSHOP_1K
from gymnasium.utils.env_checker import check_env

import trial_envs
from trial_envs.errors import (
    ClosedEnvError,
    CorruptCatalogueError,
    EpisodeOverError,
    GeneratorSettingError,
    MissingDataError,
    UnknownSplitError,
    UnknownTaskError,
)
from trial_envs.webshop import shops
from trial_envs.webshop.actions import parse_action
from trial_envs.webshop.catalogue import MANIFEST
from trial_envs.webshop.env import WebShopEnv


@pytest.fixture
def env(own_cache):
    env = WebShopEnv("generated", num_products=60, num_games=40)
    yield env
    env.close()


@pytest.fixture
def real(webshop_index):
    env = WebShopEnv("all", data=webshop_index)
    yield env
    env.close()


def play(env, task, *actions):
    observation, info = env.reset(options={"task": task})
    for action in actions:
        observation, _, _, _, info = env.step(action)
    return observation, info


def test_it_works_without_any_data_and_passes_gymnasiums_checks(own_cache):
    trial_envs.register()
    env = gymnasium.make("trial/WebShop-v0")
    assert env.unwrapped.split == "generated"
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_environments_of_a_vector_play_side_by_side(own_cache):
    envs = gymnasium.make_vec("trial/WebShop-v0", num_envs=3, vectorization_mode="sync")
    observations, infos = envs.reset(seed=1)
    assert len(set(observations)) == 3
    _, _, _, _, infos = envs.step(("search[tea]",) * 3)
    assert list(infos["page"]) == ["search_results"] * 3
    envs.close()


def test_info_holds_the_fixed_keys(env):
    observation, info = env.reset(options={"task": 3})
    assert observation.startswith("WebShop [SEP] Instruction: [SEP] Find me ")
    assert info["task_id"] == "3"
    assert info["task"] in observation
    assert info["family"] == env.goal.category
    assert info["admissible_actions"] == ["search[<your query>]", "click[search]"]
    assert (info["won"], info["score"], info["invalid_action"], info["page"]) == (False, 0.0, False, "index")


def test_a_task_may_be_named_by_number_or_text(env):
    assert env.reset(options={"task": 7})[0] == env.reset(options={"task": "7"})[0]
    assert env.reset(options={"task": "007"})[1]["task_id"] == "7"


def test_the_walkthrough_wins_with_one_reward_at_the_end(env):
    env.reset(options={"task": "5"})
    rewards = []
    for action in env.walkthrough:
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert (terminated, truncated, info["won"], info["score"], info["page"]) == (True, False, True, 1.0, "done")
    assert info["admissible_actions"] == []
    assert env.purchase.reward.parts()["r_price"] is True
    env.reset()
    assert env.purchase is None


def test_a_partial_purchase_scores_without_winning(real):
    _, info = play(
        real, 37, "search[brown polo snowmobile]", "click[b01mg1ltms]", "click[forest green]", "click[medium]"
    )
    assert info["score"] == 0.0
    _, reward, terminated, _, info = real.step("click[buy now]")
    assert (reward, terminated, info["score"], info["won"]) == (0.8, True, 0.8, False)
    assert real.purchase.options == {"color": "forest green", "size": "medium"}


def test_splits_of_both_conventions(real):
    assert list(real.tasks("test")) == [str(n) for n in range(500)]
    assert (real.tasks("train")[0], len(real.tasks("train"))) == ("500", 6410)
    assert (real.tasks("orig_eval")[0], len(real.tasks("orig_eval"))) == ("500", 1000)
    assert (real.tasks("orig_train")[0], len(real.tasks("orig_train"))) == ("1500", 5410)
    assert real.tasks("orig_test") == real.tasks("test")
    assert len(real.tasks("all")) == 6910
    assert real.tasks("all")[10:12] == real.tasks("test")[10:12]
    with pytest.raises(UnknownSplitError, match="orig_eval"):
        real.tasks("valid")


def test_drawn_tasks_belong_to_the_split(webshop_index):
    env = WebShopEnv("test", data=webshop_index)
    drawn = [int(env.reset(seed=seed)[1]["task_id"]) for seed in range(30)]
    assert max(drawn) < 500
    assert len(set(drawn)) > 20


def test_options_are_kept_on_sub_pages_and_forgotten_on_the_way_back(real):
    enter = ("search[brown polo snowmobile]", "click[b01mg1ltms]", "click[medium]")
    for detour, kept in {
        ("click[description]", "click[< prev]"): {"size": "medium"},
        ("click[features]", "click[< prev]", "click[reviews]", "click[< prev]"): {"size": "medium"},
        ("click[small]", "click[medium]"): {"size": "medium"},
        ("click[small]", "click[brown]"): {"size": "small", "color": "brown"},
        ("click[< prev]", "click[b01mg1ltms]"): {},
        ("click[back to search]", *enter[:2]): {},
        (*enter[:2],): {},
    }.items():
        play(real, 37, *enter, *detour, "click[buy now]")
        assert real.purchase.options == kept, detour


def test_pages_of_results_turn_both_ways_and_never_end(real):
    first, _ = play(real, 0, "search[shirt]")
    third, info = play(real, 0, "search[shirt]", *["click[next >]"] * 2)
    assert "Page 3 (Total results: 50)" in third
    for _ in range(2):
        observation, *_ = real.step("click[< prev]")
    assert observation == first
    assert "click[< prev]" not in play(real, 0, "search[shirt]")[1]["admissible_actions"]
    beyond, info = play(real, 0, "search[shirt]", *["click[next >]"] * 7)
    assert beyond.endswith("Page 8 (Total results: 50) [SEP] < Prev [SEP] Next >")
    assert info["admissible_actions"] == ["click[back to search]", "click[< prev]", "click[next >]"]


def test_going_back_from_a_product_returns_to_its_page_of_results(real):
    listed, info = play(real, 0, "search[shirt]", "click[next >]")
    real.step(info["admissible_actions"][3])
    assert real.step("click[< prev]")[0] == listed


def test_special_searches_list_a_category_and_a_collection(real):
    assert "(Total results: 238)" in play(real, 0, "search[<c> beauty]")[0]
    assert "(Total results: 0)" in play(real, 0, "search[<c> boats]")[0]
    assert "(Total results: 0)" not in play(real, 0, "search[<q> women's shorts]")[0]


NONSENSE = [
    *("", " ", "\n", "buy now", "search", "search[]", "click[]", "click", "[x]", "search[a", "Search[red shirt]", "]["),
    *(
        "click[buy now]",
        "click[b01mg1ltms]",
        "click[x [y]]",
        "\nsearch[a]",
        "search[<r>]",
        "search[<a> x]",
        "search[<c>]",
    ),
    *("search[\n]", "think[hm]", "x" * 10**6, "[" * 10**6, "click[" * 10**5, "]" * 10**6, "\x00\x1b[31m\ud800"),
    "search[" + " ".join(map(str, range(5000))) + "]",
]


@pytest.mark.parametrize("action", NONSENSE, ids=lambda action: ascii(action[:20]))
def test_what_is_not_understood_changes_nothing(env, action):
    before, first = env.reset(options={"task": 1})
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation, reward, terminated, truncated) == (before, 0.0, False, False)
    assert info["invalid_action"]
    assert info["admissible_actions"] == first["admissible_actions"]


@pytest.mark.parametrize(
    "action",
    [
        "search[\x00\x07]",
        "search[ ]",
        "search[\ud800]",
        "search[" + "a" * 10**6 + "]",
        "search[é★漢]",
        "search[x] tail",
    ],
    ids=lambda action: ascii(action[:20]),
)
def test_odd_searches_are_searches(env, action):
    env.reset(options={"task": 1})
    observation, _, _, _, info = env.step(action)
    assert not info["invalid_action"]
    assert "(Total results: " in observation


def test_the_label_of_the_search_button_is_on_offer_and_does_nothing(env):
    before, _ = env.reset(options={"task": 1})
    observation, _, _, _, info = env.step("click[search]")
    assert (observation, info["invalid_action"]) == (before, False)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("search[a] and more", ("search", "a")),
        ("search[a][b]", ("search[a]", "b")),
        ("click[x [y]]", ("click[x ", "y]")),
        ("search[[new] shirt]", ("search[", "new] shirt")),
        ("search[A B]", ("search", "a b")),
        ("search[[]]", ("search[", "]")),
        ("search[]]", ("search", "]")),
    ],
)
def test_brackets_are_read_as_the_engine_reads_them(text, parsed):
    assert parse_action(text) == parsed


def test_actions_are_read_as_the_published_pattern_reads_them():
    import random
    import re

    rng = random.Random(0)
    for _ in range(5000):
        text = "".join(rng.choices("ab[]\n ", k=rng.randint(0, 9)))
        match = re.match(r"(.+)\[(.+)\]", text)
        assert parse_action(text) == ((match[1], match[2].lower()) if match else (text, "")), text


@pytest.mark.parametrize("task", ["40", "-1", "abc", "", "1.0", "٣", "9" * 5000, "../1"])
def test_unknown_tasks_are_refused(env, task):
    with pytest.raises(UnknownTaskError):
        env.reset(options={"task": task})


def test_other_wrong_settings_are_refused(own_cache, env):
    with pytest.raises(UnknownSplitError):
        WebShopEnv("valid")
    with pytest.raises(GeneratorSettingError):
        WebShopEnv("generated", num_products=0)
    with pytest.raises(UnknownTaskError, match="color"):
        env.reset(options={"color": "red"})
    with pytest.raises(MissingDataError, match="WEBSHOP_DATA"):
        WebShopEnv("train")
    with pytest.raises(MissingDataError, match="nowhere"):
        WebShopEnv("train", data=own_cache / "nowhere")


def test_an_ended_or_closed_episode_takes_no_action(env):
    env.reset(options={"task": 0})
    for action in env.walkthrough:
        env.step(action)
    with pytest.raises(EpisodeOverError):
        env.step("click[back to search]")
    env.close()
    with pytest.raises(ClosedEnvError):
        env.reset()
    with pytest.raises(ClosedEnvError):
        env.tasks()


def test_fifteen_turns_truncate(env):
    env.reset(options={"task": 0})
    ends = [env.step("hm")[2:4] for _ in range(15)]
    assert ends == [(False, False)] * 14 + [(False, True)]


@pytest.mark.parametrize("name", ["products.bin", "terms.offsets.npy", "posting_products.npy", "goals.bin", MANIFEST])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_index_is_refused(webshop_index, tmp_path, name, damage):
    folder = shutil.copytree(webshop_index, tmp_path / "index")
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "short" else b"\0" * len(content))
    expected = MissingDataError if (name, damage) == (MANIFEST, "missing") else CorruptCatalogueError
    with pytest.raises(expected):
        WebShopEnv("all", data=folder)


def test_a_source_folder_is_prepared_once_and_play_goes_on_when_it_vanishes(own_cache, tmp_path):
    if not WEBSHOP_1K.is_dir():
        pytest.skip("the 1,000-product shop is not on this machine")
    folder = shutil.copytree(WEBSHOP_1K, tmp_path / "data", copy_function=shutil.copyfile)
    env = WebShopEnv("test", data=folder)
    prepared = env.catalogue.folder
    other = WebShopEnv("test", data=folder)
    assert other.catalogue is env.catalogue
    shutil.rmtree(folder)
    shutil.rmtree(prepared)
    env.reset(options={"task": 0})
    for action in env.walkthrough:
        *_, info = env.step(action)
    assert info["won"]
    with pytest.raises(MissingDataError):
        WebShopEnv("test", data=folder)


def test_large_data_are_not_prepared_in_passing(own_cache, monkeypatch):
    monkeypatch.setattr(shops, "PREPARED_ON_SIGHT", 1000)
    with pytest.raises(MissingDataError, match="import_shop"):
        WebShopEnv("test", data=WEBSHOP_1K)


def test_threads_share_a_shop_and_play_their_own_episodes(webshop_index):
    def run(number, results):
        env = WebShopEnv("all", data=webshop_index)
        results[number] = [play(env, task, "search[black shirt]", "click[next >]")[0] for task in range(20)]
        env.close()

    results = {}
    threads = [threading.Thread(target=run, args=(number, results)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(result == results[0] for result in results.values())


def test_a_missing_package_is_named_with_its_install_line():
    code = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'rapidfuzz' else f(n, *a)\n"
    code += "import gymnasium, trial_envs; gymnasium.make('trial/WebShop-v0')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "MissingPackageError: WebShop needs rapidfuzz: pip install 'trial-envs[webshop]'" in done.stderr


def test_a_shop_that_was_imported_again_is_opened_anew(own_cache):
    env = WebShopEnv("generated", num_products=5)
    folder = env.catalogue.folder
    other = WebShopEnv("generated", num_products=6).catalogue.folder
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    assert WebShopEnv("all", data=folder).catalogue.num_products == 6
    assert env.catalogue.num_products == 5

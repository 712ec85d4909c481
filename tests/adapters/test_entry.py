"""An environment of a run: made with the keywords that it takes, its tasks listed or seeds, its name unique."""

import itertools

import gymnasium
import pytest
from faulty_env import CountingEnv
from hypothesis import given
from hypothesis import strategies as st
from riddle_env import RiddleEnv
from user_env import entry_of

from trial_envs.errors import UnknownSplitError
from trial_ray.adapters import EnvironmentAdapter
from trial_ray.adapters.adapter import MAX_SEEDS
from trial_ray.adapters.registry import (
    SMALL_SEEDS,
    find_adapter,
    find_spec,
    keyword_arguments,
    make_entries,
    seed_tasks,
    warm_start_seed_tasks,
)
from trial_ray.errors import ConfigError

RIDDLE = RiddleEnv.ENV_ID


class AnythingEnv(RiddleEnv):
    """Takes whatever it is given."""

    def __init__(self, **settings):
        self.settings = settings


class ListingEnv(RiddleEnv):
    """Has a list of tasks for one split, whose tasks are no texts, and takes no ``split``."""

    def tasks(self, split):
        if split != "train":
            raise UnknownSplitError(f"there is no {split}; expected train.")
        return range(3)


def test_tasks_that_are_no_texts_are_refused():
    with pytest.raises(ConfigError, match=r"tasks\('train'\) has 0 \(int\); expected strings"):
        entry_of(ListingEnv).tasks()


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        (make_entries([("trial/ALFWorld-v0", {"split": "dev"}, 1.0)]), "has no split 'dev'; expected one of train"),
        ([entry_of(ListingEnv, {"split": "dev"})], "there is no dev; expected train"),
    ],
)
def test_an_unknown_split_names_the_settings_that_choose_it(entries, found):
    with pytest.raises(ConfigError, match=rf"{found}.*\. Set it with .*env_config.*evaluation_split.*--split"):
        entries[0].tasks()


def test_an_unknown_keyword_names_the_nearest_and_the_split_may_be_unknown():
    entry = entry_of(RiddleEnv, {"split": "test", "words": ("red",)})
    assert entry.split == "test"
    assert entry.make().unwrapped.words == ("red",)
    with pytest.raises(ConfigError, match=r"Unknown setting 'env_config.wrods'. Did you mean 'env_config.words'\?"):
        entry_of(RiddleEnv, {"wrods": ()}).make()
    anything = {"split": "test", "wrods": 1}
    assert keyword_arguments(entry_of(AnythingEnv).spec) is None
    assert entry_of(AnythingEnv, anything).make().unwrapped.settings == anything


def test_tasks_are_listed_by_the_environment_or_seeds():
    seeds = entry_of(RiddleEnv, num_seeds=3)
    assert seeds.listed_tasks() is None
    assert entry_of(CountingEnv).tasks() == ["one", "two", "three", "four"]
    assert seeds.tasks() == ["0", "1", "2"]
    assert seeds.with_config(split="test").tasks() == seed_tasks("test", 3)


SPLITS = (*SMALL_SEEDS, "train", "test2", "test-id", "dev2", "easy", "", "\0", "\0\0")


@given(st.lists(st.sampled_from(SPLITS) | st.text(max_size=16), min_size=2, max_size=8, unique=True))
def test_no_two_splits_and_warm_starts_share_a_seed(splits):
    firsts = [int(seed_tasks(split, 1)[0]) for split in splits]
    firsts += [int(warm_start_seed_tasks(seed, 1)[0]) for seed in (0, 1_000_003)]
    ordered = sorted(firsts)
    assert ordered[0] >= 0
    assert all(later - first >= MAX_SEEDS for first, later in itertools.pairwise(ordered))


@pytest.mark.parametrize("env_id", ["mine/Nowhere-v0", "no_such_module:mine/Nowhere-v0", RiddleEnv])
def test_an_unregistered_id_is_refused(env_id):
    with pytest.raises(ConfigError, match=repr(env_id)):
        find_spec(env_id)


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch):
    (tmp_path / "registering.py").write_text(
        f"import gymnasium\ngymnasium.register('{RIDDLE}', entry_point='riddle_env:RiddleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    adapter = EnvironmentAdapter(RIDDLE, task="guess")
    try:
        (entry,) = make_entries([(f"registering:{RIDDLE}", {}, 1.0)], [adapter])
    finally:
        gymnasium.registry.pop(RIDDLE, None)
    assert entry.env_id == RIDDLE
    assert entry.adapter == adapter


def test_the_users_adapter_precedes_this_packages_adapter():
    own = EnvironmentAdapter("trial/ALFWorld-v0", task="mine")
    assert find_adapter("trial/ALFWorld-v0", [own]) is own


class LimitedEnv(RiddleEnv):
    """Says itself how long an episode lasts."""

    def __init__(self, max_turns=7):
        """Take the limit."""


def test_the_smallest_turn_limit_applies():
    for config, own, limit in (({}, 50, 7), ({"max_turns": 60}, 50, 50), ({}, None, 7), ({"max_turns": 3}, None, 3)):
        assert entry_of(LimitedEnv, config, max_turns=own).max_turns == limit

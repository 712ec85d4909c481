"""A warm start in a user's environment: with its demonstrator or random play, on tasks that no two purposes share."""

from collections import defaultdict
from dataclasses import replace
from itertools import chain

import pytest
import warm_starts
from cli_fakes import read
from faulty_env import CountingEnv
from riddle_env import Curt, RiddleEnv, Solver
from user_env import entry_of, registered

from trial_ray import EnvironmentAdapter, WarmStartSpec
from trial_ray.adapters.guarded import GuardedEnv
from trial_ray.errors import ConfigError
from trial_ray.warmstart import warm_start
from trial_ray.warmstart.demonstrations import collect
from trial_ray.warmstart.policy import RECORD, load_policy
from trial_ray.warmstart.settings import CHECKED, DEMONSTRATED, EVALUATED, task_set

SETTINGS = replace(warm_starts.SETTINGS, env=RiddleEnv.ENV_ID, env_config={}, episodes_per_game=2, action_noise=0.0)
OWN = {"templates": {"plain": Curt()}, "max_turns": 4}


def demonstrated(entry):
    """Return the responses of all turns, by task, and the tokenizer."""
    policy, responses = load_policy(SETTINGS, entry), defaultdict(list)
    tokenizer = policy.tokenizer
    for turn in collect(policy):
        assert "captain, choose one" in tokenizer.decode(turn.ordinary.prompt_ids)
        responses[turn.task_id].append(tokenizer.decode(turn.ordinary.response_ids, skip_special_tokens=True))
    return responses, tokenizer


def test_scripted_demonstrator_is_demonstrated():
    entry = entry_of(RiddleEnv, **OWN, warm_start=WarmStartSpec(demonstrator=Solver))
    responses, tokenizer = demonstrated(entry)
    env = GuardedEnv(entry)
    for task, words in responses.items():
        assert [word[0] for word in words] == [env.reset(task, seed=0).observation[-1]] * 2  # one turn an episode
    assert len(responses) == SETTINGS.games
    # Words of the game and of the template are single tokens.
    assert len(tokenizer.encode("unheard")) > len(tokenizer.encode("captain")) == len(tokenizer.encode(" begins")) == 1


def test_without_a_demonstrator_random_play_is_demonstrated():
    entry = entry_of(RiddleEnv, **OWN)
    responses, _ = demonstrated(entry)
    words = [*chain(*responses.values())]
    assert len(set(words)) == 4
    assert 2 * SETTINGS.games < len(words) <= 4 * 2 * SETTINGS.games
    assert demonstrated(entry)[0] == responses


class LongWordsEnv(RiddleEnv):
    """Actions of several words; the words of two actions can form a third one."""

    ENV_ID = "mine/LongWords-v0"

    def __init__(self, words=("a 1", "a 2", "b 1")):
        super().__init__(words)


def test_any_other_action_is_never_the_planned_one():
    entry = entry_of(LongWordsEnv, **OWN, warm_start=WarmStartSpec(demonstrator=Solver))
    for setting in ("suboptimal_probability", "action_noise"):
        turns = collect(load_policy(replace(SETTINGS, **{setting: 1.0, "games": 20}), entry))
        assert len(turns) > 100
        assert not any(turn.planned for turn in turns)


@registered(RiddleEnv)
def test_model_is_made_and_cached_by_the_adapter(own_cache):
    adapter = EnvironmentAdapter(RiddleEnv.ENV_ID, **OWN)
    first = warm_start(SETTINGS, [adapter], progress=False)
    assert not first.cached
    assert first.episodes == 5
    assert read(first.path / RECORD)["examples"] >= 2 * SETTINGS.games
    assert warm_start(SETTINGS, [adapter], progress=False).cached


class ListingEnv(CountingEnv):
    """Lists enough tasks for all purposes."""

    def tasks(self, split=None):
        return [f"{split}/{number}" for number in range(20)]


@pytest.mark.parametrize("seed", [0, 963, 1_000_003])
@pytest.mark.parametrize("entry", [warm_starts.HOME, entry_of(RiddleEnv), entry_of(ListingEnv)])
def test_no_task_serves_two_purposes(entry, seed):
    settings = replace(SETTINGS, generator_seed=seed)
    sets = [task_set(settings, entry, purpose) for purpose in (DEMONSTRATED, CHECKED, EVALUATED)]
    for played, tasks in sets:
        GuardedEnv(played).reset(tasks[0], seed=0)
    names = [tasks for _, tasks in sets]
    assert [*map(len, names)] == [settings.games, settings.check_games, settings.evaluation_games]
    assert len({*chain(*names)}) == 14
    assert sets[0] != task_set(replace(settings, generator_seed=seed + 7), entry, DEMONSTRATED)
    if entry.env_id == RiddleEnv.ENV_ID:  # training draws from the same seeds
        assert not set(entry.tasks()) & set(names[0])


def test_split_with_too_few_tasks_is_refused():
    with pytest.raises(ConfigError, match="needs 14"):
        task_set(SETTINGS, entry_of(CountingEnv), DEMONSTRATED)

"""Committed evaluation sets against the data that they were chosen from, and the oracle on some of their games."""

from __future__ import annotations

from dataclasses import replace

import pytest
from third_party import ALFWORLD as RELEASE

from trial_ray.adapters.registry import EnvironmentEntry, make_entries
from trial_ray.evaluation.evaluation_sets import EvaluationSet, choose_evaluation_set, read_evaluation_set
from trial_ray.evaluation.player import evaluate_oracle

HOME, SHOP = "trial/ALFWorld-v0", "trial/WebShop-v0"


def entry_of(env_id: str, split: str, **config) -> EnvironmentEntry:
    (entry,) = make_entries([(env_id, {"split": split, **config}, 1.0)])
    return entry


@pytest.mark.data
@pytest.mark.parametrize(("name", "split"), [("seen-128", "valid_seen"), ("unseen-128", "valid_unseen")])
def test_alfworlds_sets_are_in_the_release(name, split, own_cache):
    entry = entry_of(HOME, split, data=str(RELEASE))
    assert choose_evaluation_set(entry, name) == EvaluationSet.from_entry(entry, 128)


@pytest.mark.data
def test_webshops_set_is_of_the_small_shop(published_shop, own_cache):
    entry = entry_of(SHOP, "test", data=str(published_shop))
    evaluation_set = choose_evaluation_set(entry, "webshop-128")
    assert evaluation_set == EvaluationSet.from_entry(entry, 128)
    few = replace(evaluation_set, task_ids=evaluation_set.task_ids[:8])
    bought = evaluate_oracle(few, entry)
    assert [episode.ended for episode in bought.episodes] == ["terminated"] * 8
    assert bought.overall.score > 0.9


def test_the_oracle_wins_games_of_a_set(origin, own_cache):
    if origin == "own":
        entry = entry_of(HOME, "generated", difficulty="small", num_games=12)
        few = choose_evaluation_set(entry, 6)
    else:
        entry = entry_of(HOME, "valid_unseen", data=str(RELEASE))
        few = replace(read_evaluation_set("unseen-128"), task_ids=read_evaluation_set("unseen-128").task_ids[:6])
    episodes = []
    result = evaluate_oracle(few, entry, on_episode=episodes.append)
    assert result.success_rate == 1.0
    assert result.protocol["max_turns"] == 50
    known = {episode.task_id: episode for episode in episodes[:5]}
    again = []
    assert evaluate_oracle(few, entry, known, again.append).episodes == result.episodes
    assert [episode.task_id for episode in again] == [episodes[5].task_id]

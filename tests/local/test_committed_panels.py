"""Committed panels against the data that they were chosen from, and the oracle on some of their games."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trial_ray.evaluation.named_panels import choose_panel, read_panel
from trial_ray.evaluation.oracle import evaluate_oracle
from trial_ray.evaluation.panel import Panel, PanelError

RELEASE = Path(__file__).parents[2].parent / "shared" / "data" / "alfworld"
needs_release = pytest.mark.skipif(not RELEASE.is_dir(), reason="the ALFWorld release is not on this machine")
HOME, SHOP = "trial/ALFWorld-v0", "trial/WebShop-v0"


@needs_release
@pytest.mark.parametrize(("name", "split"), [("seen-128", "valid_seen"), ("unseen-128", "valid_unseen")])
def test_alfworlds_panels_are_in_the_release(name, split, own_cache):
    panel = choose_panel(HOME, {"data": str(RELEASE)}, split, name)
    assert panel == Panel.from_env(HOME, {"data": str(RELEASE)}, split, 128)
    with pytest.raises(PanelError, match=f"is of {HOME} split '{split}'"):
        choose_panel(HOME, {"data": str(RELEASE)}, "valid_train", name)


def test_webshops_panel_is_of_the_small_shop_alone(webshop_index, own_cache):
    panel = choose_panel(SHOP, {"data": str(webshop_index)}, "test", "webshop-128")
    assert panel == Panel.from_env(SHOP, {"data": str(webshop_index)}, "test", 128)
    with pytest.raises(PanelError, match="is of trial/WebShop-v0 split 'test'"):
        choose_panel(SHOP, {}, "generated", "webshop-128")
    few = replace(panel, task_ids=panel.task_ids[:8])
    bought = evaluate_oracle(few, {"data": str(webshop_index)})
    assert [episode.ended for episode in bought.episodes] == ["terminated"] * 8
    assert bought.overall.score > 0.9


@needs_release
def test_the_oracle_wins_games_of_the_panel(own_cache):
    few = replace(read_panel("unseen-128"), task_ids=read_panel("unseen-128").task_ids[:6])
    told = []
    result = evaluate_oracle(few, {"data": str(RELEASE)}, on_episode=told.append)
    assert result.success_rate == 1.0
    assert result.protocol["max_turns"] == 50
    known = {episode.task_id: episode for episode in told[:5]}
    again = []
    assert evaluate_oracle(few, {"data": str(RELEASE)}, known, again.append).episodes == result.episodes
    assert [episode.task_id for episode in again] == [told[5].task_id]

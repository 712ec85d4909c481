"""The committed recordings are what their script writes."""

import json

from make_recordings import GAMES, alfworld_rows, reward_rows, search_rows, webshop_rows
from recordings import alfworld_episodes, plays_the_stock_engine, webshop_records

from trial_envs.alfworld.generator import generate
from trial_envs.webshop.catalogue import open_catalogue


def as_written(rows):
    return [json.loads(json.dumps(row)) for row in rows]


def test_the_shop_recordings_are_reproduced(own_shop):
    shop = open_catalogue(own_shop)
    assert as_written(webshop_rows(shop)) == webshop_records("episodes")
    assert as_written(reward_rows(shop)) == webshop_records("rewards")
    assert as_written(search_rows(shop)) == webshop_records("search")


@plays_the_stock_engine
def test_the_stock_engine_reproduces_a_recorded_game(monkeypatch, tmp_path):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))  # importing alfworld makes this folder, or one in the home
    assert as_written(alfworld_rows(generate(GAMES[-1]))) == alfworld_episodes()[-2:]
    assert [f"{episode['name']}/{episode['trial']}" for episode in alfworld_episodes()[::2]] == list(GAMES)

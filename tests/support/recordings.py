"""Recorded episodes and answers, as material and for comparison.

``own`` recordings lie in ``tests/data`` and are of generated games and a generated shop; ``make_recordings.py`` writes
them. ``published`` ones are third-party data: what the original engines answered in the official games and in the
1,000-product shop. Both have the same format.
"""

import json
import lzma
import sys
from functools import cache
from pathlib import Path

import pytest
from third_party import GOLDEN

from trial_envs.webshop.generator import ShopSetting

OWN = Path(__file__).parents[1] / "data"
FOLDERS = {"own": OWN, "published": GOLDEN}
ORIGINS = ("own", pytest.param("published", marks=pytest.mark.data))
"""Values of the fixture ``origin``."""
plays_the_stock_engine = pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="TextWorld 1.7 evaluates its grammar in locals(), which Python 3.13 leaves empty",
)
"""Mark of what plays ALFWorld's stock engine itself."""
OWN_SHOP = ShopSetting(num_products=200, num_goals=1600, seed=7)
"""The shop of the own recordings; it has enough goals for every split to hold some."""


@cache
def read_lines(path):
    """The values of an xz-compressed file with one JSON value a line."""
    with lzma.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def alfworld_episodes(origin="own"):
    """Every game as its walkthrough and as a walk of mixed actions."""
    return read_lines(FOLDERS[origin] / "alfworld_episodes.jsonl.xz")


def webshop_records(kind, origin="own"):
    """``episodes``, ``rewards`` or ``search``."""
    return read_lines(FOLDERS[origin] / f"webshop_{kind}.jsonl.xz")

"""The shops of an environment as one sequence of goals: the goals of an imported shop, or of several generated shops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from trial_envs.core.levels import require_whole
from trial_envs.webshop.catalogue import Catalogue
from trial_envs.webshop.generator import ShopSetting, open_generated

SEED_STEP = 10_000_019
"""Difference between the seeds of one environment's shops, so large that environments with similar seeds share no shop."""
MAX_OPEN = 256
"""Maximum number of open shops; each maps its files into memory, and a process may have 65,530 mappings on Linux."""


class ShopSet:
    """A set of shops with one numbering of their goals; a shop is opened when one of its goals is requested.

    With ``N`` shops, goal ``n`` of the set is goal ``n // N`` of shop ``n % N``.

    Args:
        openers: functions that open the shops, one per shop.
        num_goals: total number of goals of the shops.
    """

    def __init__(self, openers: Sequence[Callable[[], Catalogue]], num_goals: int) -> None:
        self.num_goals = num_goals
        self._num_shops = len(openers)
        self._open = lru_cache(MAX_OPEN)(lambda shop: openers[shop]())

    def locate(self, number: int) -> tuple[Catalogue, int]:
        """Return the shop of a goal, and the goal's number in this shop."""
        goal, shop = divmod(number, self._num_shops)
        return self._open(shop), goal


def imported(catalogue: Catalogue) -> ShopSet:
    """Return a set whose only shop is a catalogue that has been opened."""
    return ShopSet([lambda: catalogue], catalogue.num_goals)


def generated(setting: ShopSetting, num_shops: int) -> ShopSet:
    """Return a set of generated shops.

    Args:
        setting: setting of the first shop; its ``num_goals`` is the total of all shops.
        num_shops: maximum number of shops; there is never more than one shop per goal.

    Raises:
        GeneratorSettingError: ``num_shops`` is below 1.
    """
    require_whole(1, num_shops=num_shops)
    count = min(num_shops, setting.num_goals)

    def opener(index: int) -> Callable[[], Catalogue]:
        goals = math.ceil((setting.num_goals - index) / count)
        return lambda: open_generated(replace(setting, num_goals=goals, seed=setting.seed + SEED_STEP * index))

    return ShopSet([opener(index) for index in range(count)], setting.num_goals)

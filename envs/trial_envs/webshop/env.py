"""``trial/WebShop-v0``: WebShop as a Gymnasium environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trial_envs.core import Outcome, TextEnv
from trial_envs.core.levels import level_named, require_whole
from trial_envs.core.task_numbers import TaskNumbers
from trial_envs.webshop.catalogue import Catalogue
from trial_envs.webshop.difficulty import LEVELS
from trial_envs.webshop.generator import ShopSetting
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.oracle import plan_purchase
from trial_envs.webshop.pages import RESULTS_PER_PAGE
from trial_envs.webshop.session import Purchase, Session
from trial_envs.webshop.shop_set import ShopSet, generated, imported
from trial_envs.webshop.shops import find_data, open_shop
from trial_envs.webshop.splits import GENERATED, check_split, split_goals


class WebShopEnv(TextEnv):
    """A shop to search, browse and buy in: WebShop's ``text`` mode.

    Actions are ``search[words]`` and ``click[label]``. Any other text, or a label that is not on the page, changes nothing
    and sets ``invalid_action``. ``click[buy now]`` ends the episode with its only reward, in [0, 1], which is also
    ``score``; ``won`` means a reward of 1.0. ``info["page"]`` is the name of the current page.

    A goal is the instruction of an episode, with the product, options and price that fulfil it; task ids are goal numbers. A
    split determines the goals that ``tasks`` lists and ``reset`` draws; every goal of the shop can be played in any split.

    Args:
        split: ``train`` (goals from 500) or ``test`` (0 to 499), the WebShop paper's ``orig_train`` (from 1500),
            ``orig_eval`` (500 to 1499) and ``orig_test`` (0 to 499), ``all``, or ``generated``; default ``train`` if data
            are found, else ``generated``.
        data: folder of an indexed shop, or of WebShop's data files; default: ``WEBSHOP_DATA``, else the imported shop.
        max_turns: maximum number of actions per episode; the episode is then truncated.
        num_games: number of goals of a generated shop.
        num_products: number of products of a generated shop; default: 200, or 88 at the level ``tiny``.
        generator_seed: seed of a generated shop.
        difficulty: level of a generated shop: ``official``, with pages like those of WebShop, or ``tiny``, with few
            products and short pages.
        num_shops: number of generated shops among which the goals are divided; a model cannot memorise many shops.
        render_mode: ``"ansi"`` or ``None``.

    Raises:
        UnknownSplitError, GeneratorSettingError, MissingDataError, CorruptCatalogueError: see
            :mod:`trial_envs.errors`.
    """

    def __init__(
        self,
        split: str | None = None,
        data: str | os.PathLike[str] | None = None,
        max_turns: int = 15,
        num_games: int = 256,
        num_products: int | None = None,
        generator_seed: int = 0,
        difficulty: str = "official",
        num_shops: int = 1,
        render_mode: str | None = None,
    ) -> None:
        chosen = check_split(split or ("train" if find_data(data) else GENERATED))
        super().__init__(chosen, max_turns, render_mode)
        self._data = data
        require_whole(1, num_games=num_games)
        level = level_named(LEVELS, difficulty)
        self._setting = ShopSetting(
            level.products if num_products is None else num_products, num_games, generator_seed, difficulty
        )
        self._num_shops = num_shops
        self._results_per_page = level.results_per_page if chosen == GENERATED else RESULTS_PER_PAGE
        self._shops: ShopSet | None = self._open(chosen)
        self._catalogue: Catalogue | None = self._shops.locate(0)[0]
        self._goal: Goal | None = None
        self._session: Session | None = None

    @property
    def catalogue(self) -> Catalogue:
        """The shop of the current episode; before the first ``reset``, the shop of the first goal."""
        self._refuse_closed()
        assert self._catalogue is not None
        return self._catalogue

    @property
    def goal(self) -> Goal | None:
        """The goal of the current episode; ``None`` before the first ``reset``."""
        return self._goal

    @property
    def purchase(self) -> Purchase | None:
        """The purchase that ended the current episode, with the parts of its reward; ``None`` before a purchase."""
        return self._session.purchase if self._session else None

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """Actions that make the best purchase of the goal's product; empty before the first ``reset``."""
        return plan_purchase(self.catalogue, self._goal, self._results_per_page) if self._goal else ()

    def tasks(self, split: str | None = None) -> Sequence[str]:
        """Return the goal numbers of a split (default: the environment's own), ascending."""
        chosen = check_split(split or self.split)
        return split_goals(chosen, self._shops_of(chosen).num_goals)

    def family(self, task_id: str) -> str:
        """Return the department of the goal's product, such as ``fashion``."""
        return self._find_goal(task_id)[1].category

    def _open(self, split: str) -> ShopSet:
        return generated(self._setting, self._num_shops) if split == GENERATED else imported(open_shop(self._data))

    def _shops_of(self, split: str) -> ShopSet:
        self._refuse_closed()
        assert self._shops is not None
        own = (split == GENERATED) == (self.split == GENERATED)
        return self._shops if own else self._open(split)

    def _find_goal(self, task_id: str) -> tuple[Catalogue, Goal]:
        shops = self._shops_of(self.split)
        catalogue, goal = shops.locate(TaskNumbers(range(shops.num_goals)).number_of(task_id))
        return catalogue, catalogue.goal(goal)

    def _choose_task(self, options: Mapping[str, Any] | None) -> str:
        """Choose a goal and return its number without leading zeros as the task id; an integer task is a goal number."""
        chosen = super()._choose_task(options)
        self._find_goal(chosen)
        return str(int(chosen))

    def _task_at(self, index: int) -> str:
        return str(index)

    def _start(self, task_id: str) -> tuple[str, Outcome]:
        self._catalogue, self._goal = self._find_goal(task_id)
        self._session = Session(self._catalogue, self._goal, self._results_per_page)
        return self._goal.instruction, self._outcome()

    def _advance(self, action: str) -> Outcome:
        assert self._session is not None
        return self._outcome(understood=self._session.act(action))

    def _outcome(self, understood: bool = True) -> Outcome:
        assert self._session is not None
        purchase, page = self._session.purchase, self._session.page
        reward = purchase.reward.reward if purchase else 0.0
        return Outcome(
            observation=page.text,
            admissible_actions=page.admissible_actions,
            reward=reward,
            score=reward,
            won=reward == 1.0,
            done=purchase is not None,
            invalid_action=not understood,
        )

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        assert self._session is not None
        return super()._info(outcome) | {"page": self._session.page.name}

    def _free(self) -> None:
        self._session = self._catalogue = self._shops = None

"""Import of a shop: converts a local copy of WebShop's data to an index folder.

Nothing is downloaded. WebShop draws prices and price limits at random; they are read from files ``prices.json`` and
``goals.jsonl`` if the copy has them, or drawn with an explicit seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trial_envs.core.cache import cache_folder
from trial_envs.errors import CorruptCatalogueError, MissingDataError
from trial_envs.text_index.folder import MANIFEST, content_key
from trial_envs.webshop import sources
from trial_envs.webshop.goal import Goal, Wish, build_goals, draw_prices, read_goal
from trial_envs.webshop.index_writer import write_index
from trial_envs.webshop.nouns import tag_titles
from trial_envs.webshop.product import Product, read_product

SEED = 233
"""Default seed for drawing prices and price limits; 233 gives the values in the files of WebShop's 1,000-product set."""
IMPORTED = "webshop"
"""Name of the imported shop in the cache, which environments use if no folder is given."""
MAX_ASIN = 10
"""Maximum length of an ASIN (Amazon's product id) in characters."""

TitleTagger = Callable[[Iterable[str]], Iterable[list[str]]]
"""A function from titles to the nouns of each title."""


def import_shop(
    folder: str | Path,
    target: str | Path | None = None,
    seed: int = SEED,
    human_goals: bool = False,
    tagger: TitleTagger = tag_titles,
    files: list[sources.SourceFile] | None = None,
) -> Path:
    """Index a local copy of WebShop's data as the environments' default shop.

    Args:
        folder: folder with the files of :data:`trial_envs.webshop.sources.ROLES`.
        target: index folder to write; default: the imported shop in the user's cache.
        seed: seed for drawing the prices if the folder has no ``prices.json``, and the price limits of built goals.
        human_goals: whether goals are built from ``items_human_ins.json``, even if the folder has ``goals.jsonl``.
        tagger: function that finds the nouns of titles, used if the folder has no ``title_nouns.json``.
        files: the result of :func:`trial_envs.webshop.sources.inspect_source` for the folder, or ``None`` to compute it.

    Returns:
        The index folder, which can be given to ``trial/WebShop-v0`` as ``data`` or as ``WEBSHOP_DATA``.

    Raises:
        MissingDataError, CorruptCatalogueError, MissingPackageError: see :mod:`trial_envs.errors`.
        FileExistsError: ``target`` exists and is not an index.
    """
    return prepare(
        Path(folder), Path(target) if target else cache_folder() / IMPORTED, seed, human_goals, tagger, files
    )


def prepare(
    folder: Path,
    target: Path | None = None,
    seed: int = SEED,
    human_goals: bool = False,
    tagger: TitleTagger = tag_titles,
    files: list[sources.SourceFile] | None = None,
) -> Path:
    """Index a folder with WebShop's data.

    Args:
        folder: folder with the files of :data:`trial_envs.webshop.sources.ROLES`.
        target: index folder, which is replaced; default: a cache folder named by a digest of the content, which is
            written only once.
        seed: seed for drawing the prices if the folder has no ``prices.json``, and the price limits of built goals.
        human_goals: whether goals are built from ``items_human_ins.json``, even if the folder has ``goals.jsonl``.
        tagger: function that finds the nouns of titles, used if the folder has no ``title_nouns.json``.
        files: the result of :func:`trial_envs.webshop.sources.inspect_source` for the folder, or ``None`` to compute it.

    Returns:
        The index folder.

    Raises:
        MissingDataError, CorruptCatalogueError, MissingPackageError: see :mod:`trial_envs.errors`.
        FileExistsError: ``target`` exists and is not an index.
    """
    files = files or sources.inspect_source(folder)
    paths = sources.require_files(files, folder)
    if human_goals and "human" not in paths:
        raise MissingDataError(f"{folder} lacks items_human_ins.json, which human_goals=True needs. {sources.ORIGIN}")
    digests = {file.path.name: file.sha256 for file in files if file.path is not None}
    origin = {"files": digests, "seed": seed, "human_goals": human_goals}
    cached = cache_folder() / f"webshop-{content_key(origin)}"
    if target is None and (cached / MANIFEST).is_file():
        return cached
    data = _SourceData(paths, human_goals, tagger)
    rng = random.Random(seed)
    prices = data.prices(rng)
    goals = data.goals(prices, rng)
    return write_index(target or cached, data.tagged_products(), prices, goals, origin, replace=target is not None)


class _SourceData:
    """WebShop's data files. Every iteration over the products reads their file again, so the products are not all in memory."""

    def __init__(self, paths: dict[str, Path], human_goals: bool, tagger: TitleTagger) -> None:
        self._paths = paths
        self._tagger = tagger
        self._attributes = _mapping(paths["attributes"])
        self._human = _mapping(paths["human"]) if human_goals else None

    def products(self) -> Iterator[Product]:
        """Yield the first product with each well-formed ASIN (Amazon's product id), as WebShop's own code does."""
        seen = set()
        for raw in sources.read_list(self._paths["products"]):
            asin = raw.get("asin") if isinstance(raw, dict) else None
            if not isinstance(asin, str):
                raise CorruptCatalogueError(
                    f"{self._paths['products']} has the entry {raw!r:.80}, expected an object with an asin."
                )
            if asin == "nan" or len(asin) > MAX_ASIN or asin in seen:
                continue
            seen.add(asin)
            yield read_product(raw, self._attributes.get(asin, {}).get("attributes"))

    def tagged_products(self) -> Iterator[Product]:
        """Yield the products with the nouns of their titles."""
        if "title_nouns" in self._paths:
            recorded = _mapping(self._paths["title_nouns"])
            for product in self.products():
                if product.asin not in recorded:
                    raise CorruptCatalogueError(f"{self._paths['title_nouns']} lacks the product {product.asin}.")
                yield product.with_nouns(recorded[product.asin])
            return
        tagged = self._tagger(product.title for product in self.products())
        for product, nouns in zip(self.products(), tagged, strict=True):
            yield product.with_nouns(nouns)

    def prices(self, rng: random.Random) -> list[float]:
        """Return the price of every product."""
        if "prices" not in self._paths:
            return draw_prices(self.products(), rng)
        recorded = _mapping(self._paths["prices"])
        try:
            return [float(recorded[product.asin]) for product in self.products()]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCatalogueError(
                f"{self._paths['prices']}: a price is missing or not a number ({type(error).__name__}: {error})."
            ) from error

    def goals(self, prices: list[float], rng: random.Random) -> list[Goal]:
        """Return the goals in ``goals.jsonl``; without this file or with ``human_goals``, build goals from the instructions."""
        if "goals" in self._paths and self._human is None:
            goals = [read_goal(raw) for raw in sources.read_lines(self._paths["goals"])]
            unknown = {goal.asin for goal in goals} - {product.asin for product in self.products()}
            if unknown:
                raise CorruptCatalogueError(
                    f"{self._paths['goals']} has goals of products that the catalogue lacks: {sorted(unknown)[:3]}."
                )
            return goals
        return build_goals(self._wishes(prices), rng)

    def _wishes(self, prices: list[float]) -> Iterator[tuple[Wish, float]]:
        for product, price in zip(self.products(), prices, strict=True):
            if self._human is None:
                entry = self._attributes.get(product.asin, {})
                if entry.get("instruction") is not None:
                    yield Wish(product, entry["instruction"], tuple(entry["instruction_attributes"])), price
                continue
            for entry in self._human.get(product.asin, ()):
                options = tuple(entry["instruction_options"])
                sentence = entry["instruction"].strip(".")
                yield Wish(product, sentence, tuple(entry["instruction_attributes"]), options), price


def _mapping(path: Path) -> dict[str, Any]:
    content = sources.read_json(path)
    if not isinstance(content, dict):
        raise CorruptCatalogueError(
            f"{path} has a {type(content).__name__}, expected a JSON object with asins as keys."
        )
    return content

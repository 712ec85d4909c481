"""The import step: from a local copy of the data to an index folder.

Nothing is fetched. Whatever the data leave to chance (prices, price limits) is drawn with an explicit seed, unless it
was recorded beside them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trial_envs.core.cache import cache_folder
from trial_envs.errors import CorruptCatalogueError
from trial_envs.webshop import sources
from trial_envs.webshop.catalogue import FORMAT, MANIFEST
from trial_envs.webshop.goal import Goal, Wish, build_goals, draw_prices, read_goal
from trial_envs.webshop.index_writer import write_index
from trial_envs.webshop.nouns import tag_titles
from trial_envs.webshop.product import Product, read_product

SEED = 233
"""Seed of drawn prices and price limits; 233 gives those recorded of the 1,000-product set."""
IMPORTED = "webshop"
"""Name of the imported shop in the cache: what environments play in when nothing else is named."""
MAX_ASIN = 10

TitleTagger = Callable[[Iterable[str]], Iterable[list[str]]]


def import_shop(folder: str | Path, target: str | Path | None = None, **settings: Any) -> Path:
    """Prepares a local copy of the data; environments then find it without being told where it is.

    Args:
        folder: holds the files of :data:`trial_envs.webshop.sources.ROLES`.
        target: index folder to write; default the shop in the user's cache that is used when no folder is named.
        **settings: those of :func:`prepare`.

    Returns:
        The index folder, which the argument ``data`` and ``WEBSHOP_DATA`` also take.

    Raises:
        MissingDataError, CorruptCatalogueError, MissingPackageError: see :mod:`trial_envs.errors`.
    """
    return prepare(Path(folder), Path(target) if target else cache_folder() / IMPORTED, **settings)


def prepare(
    folder: Path,
    target: Path | None = None,
    seed: int = SEED,
    human_goals: bool = False,
    tagger: TitleTagger = tag_titles,
    files: list[sources.SourceFile] | None = None,
) -> Path:
    """Writes the index folder of a source folder.

    Args:
        folder: the source folder.
        target: where to, replacing what is there; default a folder of the cache named by the content, which is kept.
        seed: of prices and price limits that are not recorded.
        human_goals: build goals from ``items_human_ins.json``, even where other goals are recorded.
        tagger: finds nouns where they are not recorded.
        files: what :func:`trial_envs.webshop.sources.inspect_source` found, if it was called already.

    Raises:
        MissingDataError, CorruptCatalogueError, MissingPackageError: see :mod:`trial_envs.errors`.
    """
    files = files or sources.inspect_source(folder)
    paths = sources.require_files(files, folder)
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


def content_key(origin: dict[str, Any]) -> str:
    """Short digest of what an index is made from and of the layout's version."""
    text = json.dumps({"format": FORMAT, **origin}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _SourceData:
    """The parsed source files; products are read anew on each pass, so that they need not all be in memory."""

    def __init__(self, paths: dict[str, Path], human_goals: bool, tagger: TitleTagger) -> None:
        self._paths = paths
        self._tagger = tagger
        self._attributes = _mapping(paths["attributes"])
        self._human = _mapping(paths["human"]) if human_goals and "human" in paths else {} if human_goals else None

    def products(self) -> Iterator[Product]:
        """The products of the catalogue: the first of every asin, leaving out malformed asins as the engine does."""
        seen = set()
        for raw in sources.read_list(self._paths["products"]):
            asin = raw.get("asin") if isinstance(raw, dict) else None
            if not isinstance(asin, str):
                raise CorruptCatalogueError(
                    f"{self._paths['products']} holds something that is no product: {raw!r:.80}"
                )
            if asin == "nan" or len(asin) > MAX_ASIN or asin in seen:
                continue
            seen.add(asin)
            yield read_product(raw, self._attributes.get(asin, {}).get("attributes"))

    def tagged_products(self) -> Iterator[Product]:
        """The products with the nouns of their titles."""
        if "title_nouns" in self._paths:
            recorded = _mapping(self._paths["title_nouns"])
            for product in self.products():
                if product.asin not in recorded:
                    raise CorruptCatalogueError(f"{self._paths['title_nouns']} lacks the product {product.asin}")
                yield product.with_nouns(recorded[product.asin])
            return
        tagged = self._tagger(product.title for product in self.products())
        for product, nouns in zip(self.products(), tagged, strict=True):
            yield product.with_nouns(nouns)

    def prices(self, rng: random.Random) -> list[float]:
        """The price of every product."""
        if "prices" not in self._paths:
            return draw_prices(self.products(), rng)
        recorded = _mapping(self._paths["prices"])
        try:
            return [float(recorded[product.asin]) for product in self.products()]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptCatalogueError(f"{self._paths['prices']} has no price of {error}") from error

    def goals(self, prices: list[float], rng: random.Random) -> list[Goal]:
        """The goals: recorded, or built."""
        if "goals" in self._paths and self._human is None:
            goals = [read_goal(raw) for raw in sources.read_lines(self._paths["goals"])]
            unknown = {goal.asin for goal in goals} - {product.asin for product in self.products()}
            if unknown:
                raise CorruptCatalogueError(
                    f"{self._paths['goals']} asks for products that are not here: {sorted(unknown)[:3]}"
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
        raise CorruptCatalogueError(f"{path} is no JSON object from asins to values")
    return content

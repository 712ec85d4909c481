"""An indexed shop on disk, memory-mapped and read-only: products, goals and the search index."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trial_envs.errors import CorruptCatalogueError
from trial_envs.text_index.folder import checked_manifest, open_index
from trial_envs.text_index.records import REBUILD, RecordFile, load_array
from trial_envs.text_index.search import SearchIndex
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.pages import Listing
from trial_envs.webshop.product import Product


class Catalogue:
    """The products and goals of a shop, with search.

    Raises:
        CorruptCatalogueError: a file is missing or does not match the manifest of the index folder.
    """

    def __init__(self, folder: Path) -> None:
        manifest = checked_manifest(folder)
        self.folder = folder
        self._products = RecordFile(folder, "products")
        self._listings = RecordFile(folder, "listings")
        self._goals = RecordFile(folder, "goals")
        self._prices = load_array(folder, "prices", np.float64)
        self._asins = load_array(folder, "asins", np.bytes_)
        self._by_asin = load_array(folder, "by_asin", np.int32)
        self._categories = load_array(folder, "categories", np.int32)
        self._collections = load_array(folder, "collections", np.int32)
        self._groups = manifest["groups"]
        self._index = SearchIndex(folder, manifest["documents"])

    @property
    def num_products(self) -> int:
        """Number of products; a product's position is its index in the data, from 0."""
        return len(self._products)

    @property
    def num_goals(self) -> int:
        """Number of goals."""
        return len(self._goals)

    def goal(self, number: int) -> Goal:
        """Return goal ``number``, counted from 0."""
        return Goal.unpack(self._goals[number])

    def product(self, position: int) -> Product:
        """Return the product at a position in the catalogue."""
        return Product.unpack(self._products[position])

    def price(self, position: int) -> float:
        """Return the price in dollars of the product at a position in the catalogue."""
        return float(self._prices[position])

    def listing(self, position: int) -> Listing:
        """Return the entry of a results page for the product at a position in the catalogue."""
        try:
            return Listing(position, *json.loads(self._listings[position]))
        except (ValueError, TypeError) as error:
            raise CorruptCatalogueError(f"{self.folder}: listing {position} is damaged. {REBUILD}") from error

    def position(self, asin: str) -> int:
        """Return the position of the product with this ASIN (Amazon's product id).

        Raises:
            KeyError: the shop has no such product.
        """
        rank = int(np.searchsorted(self._asins, asin.encode()))
        if rank == len(self._asins) or self._asins[rank] != asin.encode():
            raise KeyError(asin)
        return int(self._by_asin[rank])

    def search(self, query: str) -> NDArray[np.int64]:
        """Return the positions of the best products for a query, best first, at most 50."""
        return self._index.search(query)

    def in_category(self, name: str) -> NDArray[np.int64]:
        """Return the positions of all products in the category ``name``, in the order of the data."""
        return self._in_group("categories", self._categories, name)

    def in_collection(self, name: str) -> NDArray[np.int64]:
        """Return the positions of all products whose field ``query`` is ``name``, in the order of the data."""
        return self._in_group("collections", self._collections, name)

    def _in_group(self, kind: str, codes: NDArray[np.int32], name: str) -> NDArray[np.int64]:
        names = self._groups[kind]
        return np.flatnonzero(codes == names.index(name)) if name in names else np.zeros(0, dtype=np.int64)


def open_catalogue(folder: Path) -> Catalogue:
    """Open the catalogue in an index folder; see :func:`trial_envs.text_index.folder.open_index` for errors."""
    return open_index(folder, Catalogue)

"""Writes the index folder of a shop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from trial_envs.text_index.analyser import index_terms
from trial_envs.text_index.folder import Groups, write_folder
from trial_envs.text_index.indexing import IndexBuilder
from trial_envs.text_index.records import RecordWriter, save_array, write_records
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.product import Product


def write_index(
    target: Path,
    products: Iterable[Product],
    prices: Sequence[float],
    goals: Iterable[Goal],
    source: Mapping[str, object],
    replace: bool = False,
) -> Path:
    """Write the index folder of a shop.

    Args:
        target: the index folder to create.
        products: products in the order of the catalogue; no ASIN may occur twice.
        prices: price of every product.
        goals: goals in the order of their numbers.
        source: origin of the data, which is written to the manifest.
        replace: whether an existing folder is replaced; otherwise it is kept, because another process may have written
            it from the same data.

    Returns:
        The folder.

    Raises:
        FileExistsError, CorruptCatalogueError: see :func:`trial_envs.text_index.folder.write_folder`.
    """

    def write(folder: Path) -> tuple[Groups, int]:
        written = _write_products(folder, products)
        save_array(folder, "prices", prices, "float64")
        write_records(folder, "goals", (goal.pack() for goal in goals))
        return written

    return write_folder(target, write, source, replace)


def _write_products(folder: Path, products: Iterable[Product]) -> tuple[Groups, int]:
    """Write the products' records and search index; return the different categories and queries, and the number of documents."""
    records, listings = RecordWriter(folder, "products"), RecordWriter(folder, "listings")
    index = IndexBuilder(folder)
    asins: list[bytes] = []
    categories: dict[str, int] = {}
    collections: dict[str, int] = {}
    codes: list[tuple[int, int]] = []
    for product in products:
        records.append(product.pack())
        listing = [product.asin, product.title, product.price_tag]
        listings.append(json.dumps(listing, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        index.add(index_terms(product.document))
        asins.append(product.asin.encode())
        codes.append(
            (
                categories.setdefault(product.category, len(categories)),
                collections.setdefault(product.query, len(collections)),
            )
        )
    records.close()
    listings.close()
    documents = index.finish()

    names = np.array(asins, dtype="S")
    order = np.argsort(names, kind="stable")
    ranks = np.empty(len(order), dtype=np.int32)
    ranks[order] = np.arange(len(order))
    save_array(folder, "asins", names[order], str(names.dtype))
    save_array(folder, "by_asin", order, "int32")
    save_array(folder, "tie_ranks", ranks, "int32")
    grouped = np.array(codes, dtype=np.int32).reshape(-1, 2)
    save_array(folder, "categories", grouped[:, 0], "int32")
    save_array(folder, "collections", grouped[:, 1], "int32")
    return {"categories": list(categories), "collections": list(collections)}, documents

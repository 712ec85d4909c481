"""Writes index folders: first to a temporary folder, which is then renamed, so no process reads a partial index."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from trial_envs.errors import CorruptCatalogueError
from trial_envs.webshop.analyser import index_terms
from trial_envs.webshop.catalogue import FORMAT, MANIFEST, Groups, Manifest, file_digest
from trial_envs.webshop.goal import Goal
from trial_envs.webshop.indexing import IndexBuilder
from trial_envs.webshop.product import Product
from trial_envs.webshop.records import REBUILD, RecordWriter, save_array, write_records


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
        target: the folder.
        products: in the order of the catalogue, each asin once.
        prices: price of every product.
        goals: in the order of their numbers.
        source: origin of the data, which is written to the manifest.
        replace: whether an existing folder is replaced; otherwise it is kept, because another process may have written
            it from the same data.

    Returns:
        The folder.

    Raises:
        FileExistsError, CorruptCatalogueError: see :func:`write_folder`.
    """

    def write(folder: Path) -> tuple[Groups, int]:
        written = _write_products(folder, products)
        save_array(folder, "prices", prices, "float64")
        write_records(folder, "goals", (goal.pack() for goal in goals))
        return written

    return write_folder(target, write, source, replace)


def write_folder(
    target: Path, write: Callable[[Path], tuple[Groups, int]], source: Mapping[str, object], replace: bool = False
) -> Path:
    """Write an index folder with its manifest.

    Args:
        target: the folder.
        write: function that writes the files into a folder; it returns the groups and the number of documents for the manifest.
        source: origin of the data, which is written to the manifest.
        replace: as in :func:`write_index`.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder to replace is not an index.
        CorruptCatalogueError: the folder to keep is not an index; it may have been deleted in part.
    """
    if replace and _is_foreign(target):
        raise FileExistsError(f"{target} exists and is not an index; choose another folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}-", suffix=".part", dir=target.parent))
    try:
        groups, documents = write(building)
        manifest: Manifest = {
            "format": FORMAT,
            "source": dict(source),
            "documents": documents,
            "groups": groups,
            "files": {
                path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
                for path in sorted(building.iterdir())
            },
        }
        (building / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        building.chmod(0o755)
        _rename(building, target, replace)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return target


def _rename(building: Path, target: Path, replace: bool) -> None:
    """Move the new folder to its place, where another process may put one, or take one away, at any time."""
    while True:
        try:
            os.rename(building, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if _is_foreign(target):
                if replace:
                    raise
                raise CorruptCatalogueError(f"{target} has files and no {MANIFEST}. {REBUILD}") from error
        if not replace:
            shutil.rmtree(building)
            return
        folder = tempfile.TemporaryDirectory(prefix=f"{target.name}-", suffix=".old", dir=target.parent)
        with folder as old, suppress(FileNotFoundError):
            os.rename(target, Path(old) / "index")


def _is_foreign(target: Path) -> bool:
    """Return whether it is a file, or a folder that has files and no index's manifest."""
    try:
        names = os.listdir(target)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    return bool(names) and MANIFEST not in names


def _write_products(folder: Path, products: Iterable[Product]) -> tuple[Groups, int]:
    """Write the records and the search index of the products; return their groups and the document count."""
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
    save_array(folder, "asin_ranks", ranks, "int32")
    grouped = np.array(codes, dtype=np.int32).reshape(-1, 2)
    save_array(folder, "categories", grouped[:, 0], "int32")
    save_array(folder, "collections", grouped[:, 1], "int32")
    return {"categories": list(categories), "collections": list(collections)}, documents

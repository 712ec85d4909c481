"""Finds the shop of an environment: the folder in the argument ``data`` or in ``WEBSHOP_DATA``, else the imported shop."""

from __future__ import annotations

import os
from pathlib import Path

from trial_envs.errors import MissingDataError
from trial_envs.text_index.folder import MANIFEST, find_index
from trial_envs.webshop import sources
from trial_envs.webshop.catalogue import Catalogue, open_catalogue
from trial_envs.webshop.preparation import IMPORTED, prepare

DATA_VARIABLE = "WEBSHOP_DATA"
PREPARED_ON_SIGHT = 64 << 20
"""Folders with up to this many bytes of WebShop's data are indexed when they are opened; larger data must be imported first."""

_HELP = (
    f"Import a local copy with trial_envs.webshop.preparation.import_shop(folder), or set {DATA_VARIABLE} (or the argument "
    "data) to an index folder or a folder with the data, or play in a generated shop with split='generated'."
)


def find_data(data: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder ``data``, else the folder in ``WEBSHOP_DATA``, else the imported shop, else ``None``."""
    return find_index(data, DATA_VARIABLE, IMPORTED)


def open_shop(data: str | os.PathLike[str] | None) -> Catalogue:
    """Open the shop in the folder ``data``; ``None`` selects the folder in ``WEBSHOP_DATA``, else the imported shop.

    Raises:
        MissingDataError: the folder does not exist, has no data, or has too much data to be indexed on opening.
        CorruptCatalogueError: the content of the folder is damaged.
    """
    folder = find_data(data)
    if folder is None:
        raise MissingDataError(f"WebShop's data were not found: no folder was given, and no shop was imported. {_HELP}")
    if not folder.is_dir():
        origin = "the argument data" if data else DATA_VARIABLE
        raise MissingDataError(f"WebShop's data were not found: {folder} ({origin}) is not a folder. {_HELP}")
    if (folder / MANIFEST).is_file():
        return open_catalogue(folder)
    size = sum(path.stat().st_size for role in sources.ROLES if (path := sources.find_file(folder, role)))
    if size > PREPARED_ON_SIGHT:
        raise MissingDataError(f"{folder} has {size / 1e9:.1f} GB of data that are not indexed. {_HELP}")
    try:
        return open_catalogue(prepare(folder))
    except FileNotFoundError as error:
        if isinstance(error, MissingDataError):
            raise
        raise MissingDataError(f"{folder} was deleted while it was read ({error}). {_HELP}") from error

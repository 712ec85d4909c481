"""The source files of a shop, which are WebShop's data: their names, their purposes, and a check of a folder by digest."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trial_envs.errors import CorruptCatalogueError, MissingDataError
from trial_envs.text_index.folder import file_digest

ORIGIN = (
    "The catalogue comes from the WebShop authors: setup.sh of github.com/princeton-nlp/WebShop downloads items_shuffle.json "
    "and items_ins_v2.json (1.18 million products, about 5.3 GB), or with -d small the 1,000-product items_shuffle_1000.json "
    "and items_ins_v2_1000.json (about 5 MB)."
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of source file: its purpose, and its accepted names, the preferred name first."""

    purpose: str
    names: tuple[str, ...]
    required: bool = False


ROLES = {
    "products": Role("products", ("items_shuffle.json", "items_shuffle_1000.json"), required=True),
    "attributes": Role("attributes and instructions", ("items_ins_v2.json", "items_ins_v2_1000.json"), required=True),
    "human": Role("instructions written by people", ("items_human_ins.json",)),
    "goals": Role("goals in their order (else built with a seed)", ("goals.jsonl",)),
    "prices": Role("drawn prices (else drawn with a seed)", ("prices.json",)),
    "title_nouns": Role("nouns of titles (else found with spaCy)", ("title_nouns.json",)),
}

KNOWN_DIGESTS = {
    "items_shuffle_1000.json.xz": "e07c86202c4f0cd303d9290d5d922cd2f9e2ea5e11e8be094fdb6f60fa19adc8",
    "items_ins_v2_1000.json": "f88a36314a397b53b3d9c3fa5878e5f7b26d35019a51ec83fbedeca61a948f6f",
    "items_human_ins.json": "bdd25a68795e698df35b4e9c6eed05cb62fb47ad6a2f4dea914fee69ebc0f694",
    "goals.jsonl.xz": "fa9c93d56719fe163ade62c6164902cfea12db1005f8d9a7df4767f9f98bc217",
    "prices.json": "03094fc4c23709b40971a050cd2dd91b26257884da75f60589e04dd7f7cf0d90",
    "title_nouns.json": "84df3b44ef1e07176602c9c71c80d8d86c48a0b292b9c77e58fb0199d9f0dc55",
}
"""SHA-256 of the files of WebShop's 1,000-product set, including its goals, prices and title nouns. Other WebShop data have no
published digests; an index stores the digests of its source files in the manifest."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The file of one role (a key of :data:`ROLES`) in a folder.

    Attributes:
        path: the file; ``None`` if it is missing.
        size: size in bytes.
        known: whether the file has the digest in :data:`KNOWN_DIGESTS`; ``None`` if no digest for its name is known.
    """

    role: str
    purpose: str
    required: bool
    path: Path | None = None
    size: int = 0
    sha256: str = ""
    known: bool | None = None


def inspect_source(folder: str | Path) -> list[SourceFile]:
    """Find the file of every role (a key of :data:`ROLES`) in a folder and compute its digest.

    Raises:
        MissingDataError: the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise MissingDataError(f"{folder} is not a folder. {ORIGIN}")
    return [_inspect_role(folder, name) for name in ROLES]


def _inspect_role(folder: Path, name: str) -> SourceFile:
    role = ROLES[name]
    path = find_file(folder, name)
    if path is None:
        return SourceFile(name, role.purpose, role.required)
    digest = file_digest(path)
    expected = KNOWN_DIGESTS.get(path.name)
    known = None if expected is None else digest == expected
    return SourceFile(name, role.purpose, role.required, path, path.stat().st_size, digest, known)


def find_file(folder: Path, role: str) -> Path | None:
    """Return the file of a role (a key of :data:`ROLES`) in a folder, plain or xz-compressed; ``None`` if it is missing."""
    for name in ROLES[role].names:
        for path in (folder / name, folder / f"{name}.xz"):
            if path.is_file():
                return path
    return None


def require_files(files: list[SourceFile], folder: Path) -> dict[str, Path]:
    """Return the paths of the existing files by role (a key of :data:`ROLES`).

    Raises:
        MissingDataError: a required file is missing.
    """
    missing = [" or ".join(ROLES[file.role].names) for file in files if file.required and file.path is None]
    if missing:
        raise MissingDataError(f"{folder} lacks {' and '.join(missing)} (each may be .xz). {ORIGIN}")
    return {file.role: file.path for file in files if file.path is not None}


@contextmanager
def _reading(path: Path) -> Iterator[IO[str]]:
    """Open a text file, plain or xz-compressed; errors in reading and decoding are raised as ``CorruptCatalogueError``."""
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as stream:
            yield stream
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise CorruptCatalogueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def read_json(path: Path) -> object:
    """Return the value of a JSON file.

    Raises:
        CorruptCatalogueError: the file is not JSON.
    """
    with _reading(path) as stream:
        value: object = json.load(stream)
        return value


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file with one JSON value per line.

    Raises:
        CorruptCatalogueError: a line is not JSON.
    """
    with _reading(path) as stream:
        for line in stream:
            yield json.loads(line)


def read_list(path: Path) -> Iterator[Any]:
    """Yield the elements of a JSON list. They are read one by one, so a file of gigabytes needs little memory.

    Raises:
        CorruptCatalogueError: the file is not a JSON list, or is truncated.
    """
    decode = json.JSONDecoder().raw_decode
    with _reading(path) as stream:
        text = stream.read(_CHUNK).lstrip()
        if not text.startswith("["):
            raise ValueError("expected a JSON list")
        text = text[1:]
        while True:
            text = text.lstrip(" \t\r\n,")
            if text.startswith("]"):
                return
            try:
                value, end = decode(text)
            except json.JSONDecodeError:
                more = stream.read(_CHUNK)
                if not more:
                    raise
                text += more
                continue
            yield value
            text = text[end:]

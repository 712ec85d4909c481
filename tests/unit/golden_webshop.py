"""What the published WebShop engine answered, and the data that it answered from."""

import json
import lzma
from functools import cache
from pathlib import Path

SHARED = Path(__file__).parents[2].parent / "shared"
SHOP = SHARED / "data" / "webshop_1k"


def read_lines(path: Path) -> list[dict]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def golden(kind: str) -> list[dict]:
    """``episodes``, ``rewards`` or ``search``."""
    return read_lines(SHARED / "golden" / f"webshop_{kind}.jsonl.xz")


@cache
def document_terms() -> dict[str, dict[str, int]]:
    """Terms of every product's document in the published index."""
    return {row["asin"]: row["terms"] for row in read_lines(SHOP / "doc_terms.jsonl.xz")}

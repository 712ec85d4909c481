"""Third-party data that tests read from beside the checkout; none of it is part of the repository."""

from pathlib import Path

SHARED = Path(__file__).parents[1].parent / "shared"
ALFWORLD = SHARED / "data" / "alfworld"
WEBSHOP_1K = SHARED / "data" / "webshop_1k"
GOLDEN = SHARED / "golden"

"""Third-party data that tests marked ``data`` compare with; none of it is part of the repository.

The folder is the one that ``TRIAL_TEST_DATA`` names, or ``shared`` beside the checkout.
"""

import os
from pathlib import Path

VARIABLE = "TRIAL_TEST_DATA"
NAMED = os.environ.get(VARIABLE)
FOLDER = Path(NAMED).expanduser() if NAMED else Path(__file__).parents[3] / "shared"
ALFWORLD = FOLDER / "data/alfworld"
WEBSHOP_1K = FOLDER / "data/webshop_1k"
GOLDEN = FOLDER / "golden"

CONTENT = {
    ALFWORLD: "the official ALFWorld games (packed: games_all.jsonl.xz, domain.pddl, grammar.twl2.tmpl)",
    WEBSHOP_1K: "WebShop's 1,000-product set with its recorded goals and prices",
    GOLDEN: "transcripts of the published engines (*.jsonl.xz)",
}


def missing():
    """What is not there and how to get it, in one line; empty where everything is there."""
    lacking = [f"{folder.relative_to(FOLDER)}, {what}" for folder, what in CONTENT.items() if not folder.is_dir()]
    if not lacking:
        return ""
    return f"no third-party data to compare with: {FOLDER} lacks {'; '.join(lacking)}. Set {VARIABLE} to a folder with them."

"""The code blocks of a documentation page."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page, mark=""):
    """Blocks that open with ``python`` and the mark."""
    text = (DOCS / page).read_text()
    return [code for found, code in re.findall(r"^```python *([\w-]*)\n(.*?)^```$", text, re.M | re.S) if found == mark]

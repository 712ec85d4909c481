"""Tables of settings and metrics in the documentation are what the code says."""

import re
from pathlib import Path

from reference_tables import fill_page, table_names

PAGES = {page.name: page.read_text(encoding="utf-8") for page in (Path(__file__).parents[2] / "docs").glob("*.md")}


def test_pages_agree_with_the_code():
    """Fix with: python docsite/reference_tables.py docs/*.md"""
    assert {name: fill_page(page) for name, page in PAGES.items()} == PAGES
    marks = [mark for page in PAGES.values() for mark in re.findall(r"<!-- (\w+ of .*) -->", page)]
    assert sorted(mark for mark in marks if mark != "table of measures") == sorted(table_names())

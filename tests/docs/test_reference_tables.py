"""Tables of settings and metrics in the documentation are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference_tables import fill_page, table_names

PAGES = {page.name: page.read_text(encoding="utf-8") for page in (Path(__file__).parents[2] / "docs").glob("*.md")}


@pytest.mark.parametrize("name", sorted(name for name, page in PAGES.items() if re.search(r"<!-- \w+ of ", page)))
def test_a_page_is_what_the_code_says(name):
    """Fix with: python docsite/reference_tables.py docs/*.md"""
    assert fill_page(PAGES[name]) == PAGES[name]


@pytest.mark.parametrize("name", table_names())
def test_every_table_stands_in_one_page(name):
    assert sum(page.count(f"<!-- {name} -->") for page in PAGES.values()) == 1

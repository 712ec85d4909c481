"""Tables of settings and metrics in the documentation are what the code says."""

import re

from reference_tables import fill_page, table_names
from snippets import DOCS


def test_pages_agree_with_the_code():
    """Fix with: python docsite/reference_tables.py docs/*.md"""
    pages = {page.name: page.read_text() for page in DOCS.glob("*.md")}
    assert {name: fill_page(page) for name, page in pages.items()} == pages
    marks = re.findall(r"<!-- (?!table of measures -->)(\w+ of .*) -->", "\n".join(pages.values()))
    assert sorted(marks) == sorted(table_names())

"""docs/settings.md is what the settings' declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from trial_ray.algorithms.settings_page import block_names, fill_page

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_code_says():
    """Mend with: python -m trial_ray.algorithms.settings_page docs/settings.md"""
    assert fill_page(PAGE) == PAGE


@pytest.mark.parametrize("name", block_names())
def test_every_section_and_method_has_its_table(name):
    assert PAGE.count(f"<!-- settings of {name} -->") == 1


def test_a_stale_table_is_made_anew():
    assert fill_page(PAGE.replace("| `gap_clip` |", "| `gap_clop` |")) == PAGE
    with pytest.raises(KeyError, match="nothing"):
        fill_page("<!-- settings of nothing -->\n<!-- end -->")

"""Reports of benchmarks, and the table that docs/benchmarks.md shows of them."""

from run_all import PAGE, fill_page, names_of_all


def test_the_page_shows_the_committed_results_and_names_every_benchmark():
    page = PAGE.read_text()
    assert fill_page(page) == page, "run: python benchmarks/run_all.py --table"
    assert [name for name in names_of_all() if f"`{name}`" not in page] == []

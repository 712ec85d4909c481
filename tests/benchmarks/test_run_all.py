"""Reports of benchmarks, and the table that docs/benchmarks.md shows of them."""

from __future__ import annotations

import json

from measure import Measure, read_measures, write_report
from run_all import PAGE, fill_page, names_of_all


def test_a_report_is_read_as_it_was_written(tmp_path):
    measures = [Measure("speed", 2.0, target=1.5, note="2 s, 1 s"), Measure("gap", 1e-3, "nats", 1e-4, "lower")]
    write_report(tmp_path / "results" / "mine.json", measures, {"rows": 3})
    assert read_measures(tmp_path / "results" / "mine.json") == measures
    record = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert [each["passes"] for each in record["measures"]] == [True, False]
    assert record["details"] == {"rows": 3}
    assert {"cpu", "threads", "packages", "commit", "load_average"} <= set(record["environment"])


def test_the_page_shows_the_committed_results_and_names_every_benchmark():
    page = PAGE.read_text(encoding="utf-8")
    assert fill_page(page) == page, "run: python benchmarks/run_all.py --table"
    assert [name for name in names_of_all() if f"`{name}`" not in page] == []

"""Measures, their verdicts and reports, and the table of docs/benchmarks.md."""

from __future__ import annotations

import json
import math
import sys

import gpu
import pytest
import torch
from bench_growth import driver_measure, exponent
from measure import Measure, interleaved, read_measures, speedup, write_report
from run_all import LONG, PAGE, RESULTS, fill_page, names_of_all


def test_a_report_is_read_as_it_was_written(tmp_path, capsys):
    measures = [Measure("speed", 2.0, target=1.5, note="2 s, 1 s"), Measure("gap", 1e-3, "nats", 1e-4, "lower")]
    write_report(tmp_path / "results" / "mine.json", measures, {"rows": 3})
    assert read_measures(tmp_path / "results" / "mine.json") == measures
    record = json.loads((tmp_path / "results" / "mine.json").read_text())
    assert [each["passes"] for each in record["measures"]] == [True, False]
    assert record["details"] == {"rows": 3}
    assert {"cpu", "threads", "packages", "commit", "load_average"} <= set(record["environment"])
    assert "miss" in capsys.readouterr().out


def test_contestants_run_in_turn_after_a_round_that_does_not_count():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in ("ours", "other")}
    times = interleaved(contestants, repeats=2)
    assert calls == ["ours", "other", "ours", "other", "other", "ours"]
    assert times == {"ours": [3.0, 6.0], "other": [4.0, 5.0]}
    assert speedup(times, "ours", "other") == 1.0


def test_exponents_are_those_of_power_laws():
    points = [{"size": size, "seconds": 3 * size**1.3} for size in (1, 2, 8)]
    assert exponent(points, "seconds") == pytest.approx(1.3)
    assert math.isnan(exponent([{"size": 1, "seconds": 0.0}, {"size": 2, "seconds": 1.0}], "seconds"))


def test_memory_that_grows_by_a_percent_in_a_hundred_iterations_is_found():
    grown = driver_measure([100 + 0.02 * index for index in range(60)])
    assert grown.figure == pytest.approx(2.0, rel=0.01)
    assert grown.passes is False
    assert driver_measure([100.0] * 60).passes


def test_the_page_shows_the_committed_results():
    page = PAGE.read_text(encoding="utf-8")
    assert fill_page(page) == page, "run: python benchmarks/run_all.py --table"
    for path in RESULTS.rglob("*.json"):
        assert all(measure.name in page for measure in read_measures(path))


def test_the_readme_quotes_the_speed_of_the_environments_as_it_was_measured():
    (speed,) = [
        each for each in read_measures(RESULTS / "alfworld.json") if each.name.endswith("steps a second against it")
    ]
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{speed.figure:.0f} times as many steps a second" in " ".join(readme.split())


def test_every_benchmark_is_described_on_the_page():
    assert set(LONG) < set(names_of_all())
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in (*names_of_all(), *gpu.PARTS) if f"`{name}`" not in page and name not in page] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_its_benchmark_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "kernels"])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err

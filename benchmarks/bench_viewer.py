"""The trajectory viewer at 10,000 trajectories: how long the page takes to write, to paint and to search, in headless Chromium.

    python benchmarks/bench_viewer.py --json benchmarks/results/viewer.json

The run is invented (``tests/support/synthetic_run.py``): responses of about 40 tokens, prompts of about 200, 8 turns a
trajectory. The page is opened from its folder as a file, each time in a browser that was started for it. Leaves out: other
browsers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Measure, write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from chromium import Chromium
from synthetic_run import make_run, save_tokenizer

TRAJECTORIES, ITERATIONS = 10_000, 25
QUERIES = {"in most": "you arrive at shelf", "in some": "take creditcard 1 from", "in none": "zeppelin"}
TIMED = """(async () => {{ const began = performance.now(); const found = await viewer.search({query!r}, () => {{}});
    return [performance.now() - began, found.size]; }})()"""
OPENED = """(async () => {{ const began = performance.now(); await viewer.show({id}); document.body.offsetHeight;
    return performance.now() - began; }})()"""
SORTED = """(() => { const began = performance.now(); const order = document.querySelector('[name=order]');
    order.value = 'disagreement'; order.dispatchEvent(new Event('change', {bubbles: true})); document.body.offsetHeight;
    return performance.now() - began; })()"""


def write_page(folder: Path) -> dict[str, Any]:
    """Make run and page; returns seconds and bytes."""
    from trial_ray.environments.alfworld import ADAPTER
    from trial_ray.models.tiny import build_tokenizer
    from trial_ray.reports.viewer import write_viewer
    from trial_ray.runs.reader import open_run

    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    run = make_run(folder / "run", tokenizer, TRAJECTORIES, ITERATIONS)
    save_tokenizer(run, tokenizer)
    began, used = time.perf_counter(), time.process_time()
    written = write_viewer([open_run(run, "run")], folder / "viewer")
    files = [path for path in (folder / "viewer").rglob("*") if path.is_file()]
    return {
        "trajectories": written.trajectories,
        "write_seconds": time.perf_counter() - began,
        "write_cpu_seconds": time.process_time() - used,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "largest_file_bytes": max(path.stat().st_size for path in files),
    }


def open_page(page: Path) -> dict[str, Any]:
    """One browser: milliseconds to paint, to the first trajectory, of searches, of another order and of a trajectory far away."""
    with Chromium() as browser:
        browser.look(1400, 900)
        browser.open(page.as_uri())
        browser.wait("performance.getEntriesByName('first-contentful-paint').length")
        browser.wait("performance.getEntriesByName('trajectory shown').length")
        times = {
            "first_paint_ms": browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"),
            "first_trajectory_ms": browser.evaluate("performance.getEntriesByName('trajectory shown')[0].startTime"),
            "order_ms": browser.evaluate(SORTED),
            "open_ms": browser.evaluate(OPENED.format(id=TRAJECTORIES // 2)),
        }
        times["first_search_ms"], _ = browser.evaluate(TIMED.format(query="first"))
        found = {name: browser.evaluate(TIMED.format(query=query)) for name, query in QUERIES.items()}
        times["search_ms"] = {name: each[0] for name, each in found.items()}
        times["found"] = {name: each[1] for name, each in found.items()}
        times["heap_bytes"] = browser.evaluate("performance.memory.usedJSHeapSize")
        return times


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        written = write_page(Path(folder))
        opened = [open_page(Path(folder) / "viewer" / "index.html") for _ in range(args.repeats)]

    def middle(name: str) -> float:
        return statistics.median(each[name] for each in opened) / 1000

    later = statistics.median(max(each["search_ms"].values()) for each in opened) / 1000
    measures = [
        Measure("viewer: first paint", middle("first_paint_ms"), "s", 1.0, "lower", "10,000 trajectories, median"),
        Measure("viewer: first trajectory shown", middle("first_trajectory_ms"), "s", 1.0, "lower", "the same pages"),
        Measure("viewer: first search", middle("first_search_ms"), "s", note="reads the text of all trajectories"),
        Measure("viewer: later search", later, "s", 1.0, "lower", "slowest of three queries"),
        Measure("viewer: another order", middle("order_ms"), "s", note="by disagreement"),
        Measure("viewer: a trajectory far away", middle("open_ms"), "s", note="its block read from disk"),
        Measure(
            "viewer: time to write the page", written["write_seconds"], "s",
            note=f"{written['write_cpu_seconds']:.0f} s of CPU; {written['bytes'] / 1e6:.0f} MB in {written['files']} files",
        ),
    ]  # fmt: skip
    write_report(args.json, measures, {"page": written, "opened": opened})


if __name__ == "__main__":
    main()

"""Run benchmarks in sequence, write JSON to ``benchmarks/results``, and print one table of all measures.

    python benchmarks/run_all.py              # make bench: under 20 minutes on two quiet cores
    python benchmarks/run_all.py NAME ...     # the named benchmarks, such as update for bench_update.py
    python benchmarks/run_all.py --table      # runs nothing: writes the table of all results into docs/benchmarks.md

The environments' benchmarks compare every answer with the published engines and take longer (make bench-envs runs them).
Third-party data sets and recordings are used if ``TRIAL_TEST_DATA`` (see CONTRIBUTING.md) or ``ALFWORLD_DATA`` points to them. The
exit status is 1 only if a benchmark fails to run, not if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from measure import Measure, read_measures, run_script
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
LONG = ("alfworld", "webshop")
TIMEOUT_S = 1800.0
_BLOCK = re.compile(r"(<!-- table of measures -->\n).*?(<!-- end -->)", re.DOTALL)


def names_of_all() -> list[str]:
    """Return the names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def run(name: str) -> bool:
    """Run a benchmark; return whether it succeeded."""
    arguments = [str(HERE / f"bench_{name}.py"), "--json", str(RESULTS / f"{name}.json")]
    return run_script(f"bench_{name}.py", arguments, None if name in LONG else TIMEOUT_S)


def measures_of(names: list[str]) -> dict[str, list[Measure]]:
    """Return the last written measures by benchmark; results of GPU benchmarks are in a separate folder."""
    files = {name: RESULTS / f"{name}.json" for name in names}
    return {name: read_measures(path) for name, path in files.items() if path.is_file()}


def figure_of(measure: Measure) -> str:
    """Return the figure, bold if it misses its target, and the target in brackets."""
    figure = measure.text_of(measure.figure)
    figure = f"**{figure}**" if measure.verdict == "miss" else figure
    return f"{figure} ({measure.target_text})" if measure.target_text else figure


def show(measures: dict[str, list[Measure]], failed: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("benchmark", "measure", "target", "figure", "", title="Measures")
    colours = {"pass": "green", "miss": "red", "": "dim"}
    for name, found in measures.items():
        for each in found:
            verdict = f"[{colours[each.verdict]}]{each.verdict}[/]" if each.verdict else ""
            note = f"\n[dim]{each.note}[/dim]" if each.note else ""
            table.add_row(name, each.name + note, each.target_text, each.text_of(each.figure), verdict)
    for name in failed:
        table.add_row(name, "failed to run; see its output above", "", "", "[red]failed[/]")
    console.print(table)
    flat = [each for found in measures.values() for each in found if each.target is not None]
    console.print(
        f"{sum(bool(each.passes) for each in flat)} of {len(flat)} targets reached, {len(failed)} failed to run"
    )


def fill_page(page: str) -> str:
    """Return ``page`` with the table of measures and their origins between its markers."""
    lines, met = ["| measure | figure |", "| --- | --- |"], 0
    names_by_origin: dict[str, list[str]] = {}
    for path in sorted(RESULTS.rglob("*.json")):
        found = read_measures(path)
        shown = [each for each in found if each.unit == "x" or each.verdict != "pass"]
        lines += [f"| {each.name} | {figure_of(each)} |" for each in shown]
        met += len(found) - len(shown)
        if found:
            names_by_origin.setdefault(taken_on(path), []).append(f"`{path.stem}`")
    more = f"{met} more, of equal answers, gradients and log-probabilities, meet their targets."
    origins = [f"- {', '.join(names)}: {origin}" for origin, names in names_by_origin.items()]
    tables = "\n\n".join(["\n".join(lines), more, "Taken on:", "\n".join(origins)])
    return _BLOCK.sub(lambda match: f"{match[1]}\n{tables}\n\n{match[2]}", page)


def taken_on(path: Path) -> str:
    facts = json.loads(path.read_text(encoding="utf-8"))["environment"]
    machine = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    return f"{machine}, {facts['date']}, commit {facts['commit']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="benchmarks to run; default: all but the long ones")
    parser.add_argument("--table", action="store_true", help="write the table of all results into docs/benchmarks.md")
    args = parser.parse_args()
    if args.table:
        PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    names = args.names or [name for name in names_of_all() if name not in LONG]
    if unknown := sorted(set(names) - set(names_of_all())):
        parser.error(f"unknown: {', '.join(unknown)}; expected some of: {', '.join(names_of_all())}")
    began = time.perf_counter()
    failed = [name for name in names if not run(name)]
    show(measures_of([name for name in names if name not in failed]), failed)
    print(f"{(time.perf_counter() - began) / 60:.1f} minutes")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

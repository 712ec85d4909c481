"""A result table as Markdown and as LaTeX, in percent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trial_ray.evaluation.tables import Cell, ResultTable

CAPTION = (
    "Success and score in percent, mean over seeds, with 95 % intervals (success, and scores that are all 0 or all 100: "
    "Wilson's over all episodes; other scores: bootstrap over seeds and tasks). Avg. is the success of the split, not the mean "
    "of the families."
)

DIFFERENCE_COLUMNS = (
    "Methods",
    "Difference",
    "95 % interval",
    "p",
    "p (Holm)",
    "95 % interval (t)",
    "p (t)",
    "p (t, Holm)",
    "Seeds",
)


def to_markdown(table: ResultTable, title: Callable[[str], str] = str) -> str:
    """One Markdown table a backbone; every cell is ``mean [low, high]``, the best of a column in bold.

    Args:
        table: the results.
        title: how a method of some name is written; by default its own name.
    """
    parts = []
    for backbone in table.methods:
        head = [f"{block.title} {column.title}" for block, column in table.columns]
        lines = [f"**{backbone}**", "", _markdown_row(["Method", *head]), f"| --- |{' ---: |' * len(head)}"]
        for method, row in _ranked_rows(table, backbone):
            lines.append(_markdown_row([title(method), *(_markdown_cell(*cell) for cell in row)]))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, _comparison_table(table, title), CAPTION]) + "\n"


def to_latex(table: ResultTable, title: Callable[[str], str] = str) -> str:
    """A ``table*`` environment for booktabs: best values bold, second-best underlined, per backbone and column.

    Args:
        table: the results.
        title: as for :func:`to_markdown`.
    """
    width = len(table.columns)
    spans, rules, start = [], [], 2
    for block in table.blocks:
        end = start + len(block.columns) - 1
        spans.append(f"\\multicolumn{{{len(block.columns)}}}{{c}}{{{escape(block.title)}}}")
        rules.append(f"\\cmidrule(lr){{{start}-{end}}}")
        start = end + 1
    titles = [escape(column.title) for _, column in table.columns]
    lines = [
        "\\begin{table*}[t]",
        "  \\centering",
        "  \\small",
        "  \\resizebox{\\textwidth}{!}{%",
        f"  \\begin{{tabular}}{{@{{}}l{'r' * width}@{{}}}}",
        "    \\toprule",
        f"    & {' & '.join(spans)} \\\\",
        f"    {''.join(rules)}",
        f"    Method & {' & '.join(titles)} \\\\",
    ]
    for backbone in table.methods:
        lines += ["    \\midrule", f"    \\multicolumn{{{width + 1}}}{{l}}{{\\textit{{{escape(backbone)}}}}} \\\\"]
        for method, row in _ranked_rows(table, backbone):
            cells = [_latex_cell(*cell) for cell in row]
            lines.append(f"    {escape(title(method))} & {' & '.join(cells)} \\\\")
    lines += ["    \\bottomrule", "  \\end{tabular}", "  }", f"  \\caption{{{escape(CAPTION)}}}", "\\end{table*}"]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Text with the characters escaped that LaTeX would take as its own."""
    special = {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
    return "".join(special.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)


def _ranked_rows(table: ResultTable, backbone: str) -> Iterator[tuple[str, list[tuple[Cell | None, int]]]]:
    """The methods of a backbone with their cells, each with its rank in the column.

    1 for the best mean of a column as it is shown and 2 for the second-best, ties sharing a rank; 0 for all others.
    """
    rows = {method: table.cells(backbone, method) for method in table.methods[backbone]}
    best = [
        sorted({_mean(cell) for cell in cells if cell}, key=float)[:-3:-1] for cells in zip(*rows.values(), strict=True)
    ]
    for method, cells in rows.items():
        ranks = [
            first.index(_mean(cell)) + 1 if cell and _mean(cell) in first else 0
            for cell, first in zip(cells, best, strict=True)
        ]
        yield method, list(zip(cells, ranks, strict=True))


def _mean(cell: Cell) -> str:
    """The mean as it is shown."""
    return f"{100 * cell.mean:.1f}"


def _markdown_cell(cell: Cell | None, rank: int) -> str:
    if cell is None:
        return "–"
    low, high = cell.interval
    mean = _mean(cell)
    return f"{f'**{mean}**' if rank == 1 else mean} [{100 * low:.1f}, {100 * high:.1f}]"


def _latex_cell(cell: Cell | None, rank: int) -> str:
    if cell is None:
        return "--"
    low, high = cell.interval
    mean = _mean(cell)
    shown = {1: f"\\textbf{{{mean}}}", 2: f"\\underline{{{mean}}}"}.get(rank, mean)
    return f"{shown} {{\\scriptsize[{100 * low:.1f}, {100 * high:.1f}]}}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _comparison_table(table: ResultTable, title: Callable[[str], str]) -> str:
    lines = [
        "Differences, paired bootstrap over seeds and tasks, then a paired t-test over seeds; p (Holm) is adjusted for the "
        "number of differences of a column:",
        "",
        f"| Backbone | Column | {' | '.join(DIFFERENCE_COLUMNS)} | Tasks |",
        f"| --- | --- | --- |{' ---: |' * len(DIFFERENCE_COLUMNS)}",
    ]
    for found in table.comparisons():
        where = [found["backbone"], f"{found['block']} {found['column']}"]
        lines.append(_markdown_row([*where, *difference_cells(found, title), str(found["tasks"])]))
    return "\n".join(lines)


def difference_cells(found: Mapping[str, Any], title: Callable[[str], str] = str) -> list[str]:
    """One difference under :data:`DIFFERENCE_COLUMNS`, in points.

    Args:
        found: ``BootstrapInterval.to_dict``, adjusted (``add_adjusted``), with ``method`` and ``reference``.
        title: as for :func:`to_markdown`.
    """
    methods = f"{title(found['method'])} − {title(found['reference'])}"
    cells = [methods, f"{100 * found['mean']:+.1f}", *_interval_cells(found)]
    over_seeds = found["over_seeds"]
    return [*cells, *(_interval_cells(over_seeds) if over_seeds else ["–"] * 3), str(found["seeds"])]


def _interval_cells(found: Mapping[str, Any]) -> list[str]:
    interval = f"[{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    return [interval, f"{found['p_value']:.2g}", f"{found['p_holm']:.2g}"]

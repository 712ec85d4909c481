"""How large the project is: files, lines and Python tokens by package, and words of the documentation.

Tokens are those of ``tokenize`` without comments, docstrings and line ends, so that neither layout nor explanation counts.

    python benchmarks/code_size.py
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def tokens(file: Path) -> int:
    """Tokens of a file, layout, comments and docstrings aside."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    with open(file, "rb") as source:
        return sum(
            token.type not in LAYOUT and token.start not in docstrings for token in tokenize.tokenize(source.readline)
        )


def row(name: str, files: Iterable[Path]) -> str:
    """A line of the table."""
    found = list(files)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in found)
    return f"| {name} | {len(found)} | {sum(map(tokens, found)):,} | {lines:,} |"


def longest(files: Iterable[Path], number: int) -> list[str]:
    """The longest functions."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((node.end_lineno - node.lineno + 1, f"{file.relative_to(ROOT)} {node.name}"))
    return [f"{lines} {name}" for lines, name in sorted(found, reverse=True)[:number]]


def main() -> None:
    """Print the tables."""
    own = sorted((ROOT / "trial_ray").rglob("*.py"))
    print("| | files | tokens | lines |\n| --- | ---: | ---: | ---: |")
    for name in ("trial_ray", "envs", "tests", "benchmarks", "tuned_examples"):
        print(row(name, sorted((ROOT / name).rglob("*.py"))))
    for folder in sorted({file.relative_to(ROOT / "trial_ray").parts[0] for file in own}):
        inside = [file for file in own if file.relative_to(ROOT / "trial_ray").parts[0] == folder]
        print(row(f"trial_ray/{folder}", inside))
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    words = sum(len(re.findall(r"\S+", page.read_text(encoding="utf-8"))) for page in pages)
    print(f"\nPages in docs/: {len(pages) - 1}; words with the README: {words:,}")
    by_length = sorted(own, key=lambda file: -len(file.read_text(encoding="utf-8").splitlines()))
    print("Longest files:", ", ".join(f"{file.relative_to(ROOT)}" for file in by_length[:10]))
    print("Longest functions:", ", ".join(longest(own, 10)))


if __name__ == "__main__":
    main()

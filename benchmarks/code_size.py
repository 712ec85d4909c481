"""Sizes of the project: files, lines and Python tokens by package, and words of the documentation.

Tokens are those of ``tokenize`` without comments, docstrings and line ends, so that neither layout nor explanation counts.

    python benchmarks/code_size.py
    python benchmarks/code_size.py --most trial_ray=180000 words=31000    # fails if a size exceeds its limit (make lint)
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("trial_ray", "envs", "tests", "benchmarks", "tuned_examples")
WORDS = "words"
MAX_LINES = 450
"""Maximum number of lines of a file of ``trial_ray``."""
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
    """Return the number of tokens of a file without layout, comments and docstrings."""
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


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def row(name: str, files: Iterable[Path]) -> str:
    """Return a row of the table."""
    paths = list(files)
    return f"| {name} | {len(paths)} | {sum(map(tokens, paths)):,} | {sum(map(lines, paths)):,} |"


def sources(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def pages(root: Path) -> list[Path]:
    return [*sorted((root / "docs").glob("*.md")), root / "README.md"]


def words(root: Path) -> int:
    """Return the number of words of README and docs."""
    return sum(len(re.findall(r"\S+", page.read_text(encoding="utf-8"))) for page in pages(root))


def excesses(root: Path, most: dict[str, int]) -> list[str]:
    """Return a line for each size that exceeds its limit.

    Args:
        root: root folder of the repository.
        most: maximum number of tokens by package, and of words of README and docs under ``words``.
    """
    found = []
    for name, limit in most.items():
        size, unit = (words(root), "words") if name == WORDS else (sum(map(tokens, sources(root, name))), "tokens")
        if size > limit:
            where = "README and docs have" if name == WORDS else f"{name} has"
            found.append(
                f"{where} {size:,} {unit}, {size - limit:,} more than the {limit:,} of the Makefile's SIZES. "
                "Take something away, or say in the commit why the limit rises."
            )
    for file in sources(root, "trial_ray"):
        if lines(file) > MAX_LINES:
            name = file.relative_to(root)
            found.append(f"{name} has {lines(file)} lines, expected at most {MAX_LINES}: split or shorten it.")
    return found


def limit_of(text: str) -> tuple[str, int]:
    """Parse ``NAME=NUMBER`` of the command line."""
    name, _, number = text.partition("=")
    if name not in (*CODE, WORDS) or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=NUMBER with a name of {', '.join((*CODE, WORDS))}")
    return name, int(number)


def longest(files: Iterable[Path], number: int) -> list[str]:
    """Return the lengths and names of the ``number`` longest functions, one per line."""
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((node.end_lineno - node.lineno + 1, f"{file.relative_to(ROOT)} {node.name}"))
    return [f"{lines} {name}" for lines, name in sorted(found, reverse=True)[:number]]


def show() -> None:
    """Print the tables."""
    own = sources(ROOT, "trial_ray")
    print("| | files | tokens | lines |\n| --- | ---: | ---: | ---: |")
    for name in CODE:
        print(row(name, sources(ROOT, name)))
    for folder in sorted({file.relative_to(ROOT / "trial_ray").parts[0] for file in own}):
        inside = [file for file in own if file.relative_to(ROOT / "trial_ray").parts[0] == folder]
        print(row(f"trial_ray/{folder}", inside))
    print(f"\nPages in docs/: {len(pages(ROOT)) - 1}; words with the README: {words(ROOT):,}")
    by_length = sorted(own, key=lines, reverse=True)
    print("Longest files:", ", ".join(f"{lines(file)} {file.relative_to(ROOT)}" for file in by_length[:10]))
    print("Longest functions:", ", ".join(longest(own, 10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", nargs="+", type=limit_of, metavar="NAME=NUMBER", help="fail if something is larger")
    args = parser.parse_args()
    if args.most is None:
        show()
    elif excess := excesses(ROOT, dict(args.most)):
        sys.exit("\n".join(excess))


if __name__ == "__main__":
    main()

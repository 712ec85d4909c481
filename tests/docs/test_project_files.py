"""Pages agree with the repository: links, anchors, files, command lines, make targets."""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
import shlex
from importlib.metadata import metadata
from pathlib import Path

import pytest

from trial_ray.cli import build_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(
        ROOT / f"{name}.md"
        for name in ("README", "AGENTS", "CONTRIBUTING", "CHANGELOG", "envs/README", "cluster/README")
    ),
    *sorted(DOCS.rglob("*.md")),
]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=\S).*$", re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A word that stands for a value, such as FILE or N, and what shows that a command is not whole.
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
INCOMPLETE = re.compile(r"…|\.\.\.|[\[\]|]|\bCOMMAND\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(text: str) -> str:
    return CODE_SPAN.sub("", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """Those that GitHub gives to a page's headings, and docsite/repository_pages.py on the site."""
    titles = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", read(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def shell_lines(text: str) -> list[str]:
    """Lines of code that may be commands: in shell blocks, indented blocks and code spans; comments and prompts removed."""
    blocks = [match["body"] for match in FENCE.finditer(text) if match["language"] in {"", "bash", "shell"}]
    rest = FENCE.sub("", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [*INDENTED.findall(rest), *CODE_SPAN.findall(rest)]
    return [re.sub(r"\s#\s.*$", "", line).strip().removeprefix("$ ") for line in lines]


def commands(program: str) -> list[tuple[str, str]]:
    """``(page, line)`` of everything on the pages that calls a program."""
    start = re.compile(rf"(?:[A-Z_]+=\S+ |\S*bin/)?({re.escape(program)} .*)")
    found = [(name_of(page), start.fullmatch(line)) for page in PAGES for line in shell_lines(read(page))]
    return sorted({(page, match[1]) for page, match in found if match})


def written_out(line: str) -> bool:
    """Whether a command stands there as one would type it; the value of a setting may hold any character."""
    return not INCOMPLETE.search(line.partition(" --set ")[0])


def test_what_finds_commands_and_links_finds_some():
    assert len(commands("trial-ray")) > 20
    assert len(commands("make")) > 5
    assert sum(len(LINK.findall(prose(read(page)))) for page in PAGES) > 60


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_link_and_anchor_leads_somewhere(path):
    broken = []
    for link in LINK.findall(prose(read(path))):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (
            ROOT / posixpath.normpath(posixpath.join(path.parent.relative_to(ROOT).as_posix(), file)) if file else path
        )
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_file_that_is_named_exists(path):
    pattern = re.compile(
        r"(?:docs|docsite|tests|benchmarks|cluster|requirements|trial_ray|tuned_examples)/[\w./-]*\w\.\w+"
    )
    named = {span for span in CODE_SPAN.findall(FENCE.sub("", read(path))) if pattern.fullmatch(span)}
    assert [name for name in sorted(named) if not (ROOT / name).is_file() and "NAME" not in name] == []


@pytest.mark.parametrize(("page", "line"), [call for call in commands("trial-ray") if written_out(call[1])])
def test_every_command_line_parses(page, line):
    words = ["1" if PLACEHOLDER.fullmatch(word) else word for word in shlex.split(line)[1:]]
    if len(words) == 1 and not words[0].startswith("-"):
        words.append("--help")  # a command that is named without what it needs
    said, status = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            build_parser().parse_args(words)
        except SystemExit as stop:
            status = stop.code
    assert status == 0, said.getvalue()


@pytest.mark.parametrize(("page", "line"), commands("make"))
def test_every_make_target_that_is_named_exists(page, line):
    assert {word for word in shlex.split(line)[1:] if "=" not in word} <= TARGETS


def test_the_page_on_installation_lists_every_extra():
    listed = CODE_SPAN.findall(read(DOCS / "installation.md"))
    assert set(metadata("trial-ray").get_all("Provides-Extra")) <= set(listed)

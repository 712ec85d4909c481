"""Pages agree with the repository: files, command lines, make targets, settings. The build of the site checks links."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from importlib.metadata import metadata
from pathlib import Path

from snippets import snippets

from trial_ray import TRIALConfig
from trial_ray.cli import build_parser
from trial_ray.runs.experiment import load_experiment

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "docs/**/*.md", "envs/README.md", "cluster/README.md")
    for page in sorted(ROOT.glob(pattern))
]
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=\S).*$", re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:docs|docsite|tests|benchmarks|cluster|requirements|trial_ray|tuned_examples)/[\w./-]*\w\.\w+")
# A word that stands for a value, such as FILE or N, and signs of an incomplete command.
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
INCOMPLETE = re.compile(r"…|\.\.\.|[\[\]|]|\bCOMMAND\b")


def shell_lines(text: str) -> list[str]:
    """Return lines that may be commands, without comments: of shell blocks, indented blocks and code spans."""
    blocks = [match["body"] for match in FENCE.finditer(text) if match["language"] in {"", "bash", "shell"}]
    rest = FENCE.sub("", text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [*INDENTED.findall(rest), *CODE_SPAN.findall(rest)]
    return [re.sub(r"\s#\s.*$", "", line).strip() for line in lines]


def commands(program: str) -> set[str]:
    """Return all lines of the pages that call a program."""
    start = re.compile(rf"(?:[A-Z_]+=\S+ |\S*bin/)?({re.escape(program)} .*)")
    lines = {line for page in PAGES for line in shell_lines(page.read_text(encoding="utf-8"))}
    return {match[1] for match in map(start.fullmatch, lines) if match}


def parse_error(line: str) -> str:
    """Return what the command-line parser prints about a command that it rejects."""
    words = ["1" if PLACEHOLDER.fullmatch(word) else word for word in shlex.split(line)[1:]]
    if len(words) == 1 and not words[0].startswith("-"):
        words.append("--help")  # a command that is named without its arguments
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            build_parser().parse_args(words)
        except SystemExit as stop:
            return printed.getvalue() if stop.code else ""
    return ""


def test_every_command_line_parses():
    # The value of a setting may contain any character.
    lines = [line for line in commands("trial-ray") if not INCOMPLETE.search(line.partition(" --set ")[0])]
    assert len(lines) > 20
    assert {line: error for line in lines if (error := parse_error(line))} == {}


def test_every_make_target_exists():
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    words = {word for line in commands("make") for word in shlex.split(line)[1:] if "=" not in word}
    assert {"train", "docs"} <= words <= set(targets)


def test_every_file_exists():
    spans = {span for page in PAGES for span in CODE_SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))}
    files = {span for span in spans if FILE.fullmatch(span) and "NAME" not in span}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_every_extra_is_listed():
    listed = CODE_SPAN.findall((ROOT / "docs" / "installation.md").read_text(encoding="utf-8"))
    assert set(metadata("trial-ray").get_all("Provides-Extra")) <= set(listed)


def test_readme_shows_the_quickstart_settings():
    [code] = snippets("../README.md")
    shown: dict = {}
    exec(code, shown)
    quickstart = load_experiment(ROOT / "tuned_examples" / "alfworld_quickstart.py")
    assert shown["stop"] == quickstart.stop
    default, settings = TRIALConfig().to_dict(), quickstart.config.to_dict()
    for name, value in shown["config"].to_dict().items():
        if isinstance(value, dict) and value != default[name]:
            assert value.items() <= settings[name].items(), name
        elif value != default[name]:
            assert value == settings[name], name

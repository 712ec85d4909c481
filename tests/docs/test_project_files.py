"""Project files and pages agree with the repository: links, anchors, command lines, make targets, versions."""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import trial_ray
from trial_ray.cli import build_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "envs/README.md", "cluster/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
YAML_FILES = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    *(ROOT / name for name in ("mkdocs.yml", "CITATION.cff", ".pre-commit-config.yaml")),
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


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in nav_pages(part)]


def test_what_finds_commands_and_links_finds_some():
    assert len(commands("trial-ray")) > 20
    assert len(commands("make")) > 5
    assert sum(len(LINK.findall(prose(read(page)))) for page in PAGES) > 60


@pytest.mark.parametrize("path", YAML_FILES, ids=name_of)
def test_every_yaml_file_parses(path):
    assert yaml.safe_load(read(path))


def test_the_workflow_calls_make_targets_alone():
    workflow = yaml.safe_load(read(ROOT / ".github/workflows/ci.yml"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = [line.split() for step in steps for line in step.get("run", "").splitlines()]
    assert all(len(words) == 2 and words[0] == "make" and words[1] in TARGETS for words in called), called
    assert {target for _, target in called} == {"lint", "test", "test-peers", "docs"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert len(tested) > 1
    declared = {
        line.rpartition(" :: ")[2].rstrip('",') for line in read(ROOT / "setup.py").splitlines() if ":: 3." in line
    }
    assert set(tested) <= declared == set(re.findall(r"python(3\.\d+)", read(ROOT / "Makefile").split("MAKE_VENV")[0]))


def test_hooks_before_a_commit_are_the_tools_of_make_lint():
    (repository,) = yaml.safe_load(read(ROOT / ".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        tool = hook["entry"].removeprefix(".venv/").replace(" --force-exclude", "")
        assert f"\t$({tool.split('/')[0].upper()})/{tool.split('/')[1]}" in read(ROOT / "Makefile")


def test_citation_and_distributions_have_this_version(tmp_path):
    citation = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert citation["version"] == trial_ray.__version__
    # The environments install as a folder of their own, without the trainer beside it.
    vendored = shutil.copytree(ROOT / "envs", tmp_path / "envs", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    for folder in (ROOT, vendored):
        asked = [sys.executable, "setup.py", "--version"]
        told = subprocess.run(asked, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout
        assert told.split()[-1] == trial_ray.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert all(reference.keys() >= {"type", "title", "authors"} for reference in citation["references"])


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", read(ROOT / "requirements" / name), re.MULTILINE))


@pytest.mark.parametrize("name", ["cpu.txt", "docs.txt", "bench.txt"])
def test_every_pinned_version_has_digests(name):
    """uv checks all packages of a file as soon as one has a digest, so none may lack them."""
    entries = re.split(
        r"\n(?=\S)", re.sub(r"^#.*\n", "", read(ROOT / "requirements" / name), flags=re.MULTILINE).strip()
    )
    assert len(entries) == len(pins(name))
    assert all(re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry) for entry in entries)


@pytest.mark.parametrize(
    ("wanted", "packages"),
    [
        ("docs", {"mkdocs-material", "mkdocstrings-python", "latex2mathml"}),
        ("bench", {"trl", "transformers", "datasets", "accelerate"}),
    ],
)
def test_what_a_target_needs_is_pinned_as_the_rest_and_installed_for_it_alone(wanted, packages):
    found, cpu = pins(f"{wanted}.txt"), pins("cpu.txt")
    assert packages <= set(found)
    assert {name: version for name, version in found.items() if cpu.get(name, version) != version} == {}
    for target in ("train", "test", "lint", wanted):
        made = subprocess.run(
            ["make", "-C", ROOT, "-nB", target], capture_output=True, text=True, timeout=60, check=True
        )
        assert (f"requirements/{wanted}.txt" in made.stdout) is (target == wanted)
        assert ("requirements/cpu.txt" in made.stdout) is (target != "docs")


def test_the_site_has_every_page_once():
    source = read(ROOT / "docsite" / "repository_pages.py")
    outside = dict(re.findall(r'^    "([\w/]+\.md)": "([\w/]+\.md)",$', source, re.MULTILINE))
    assert {ROOT / origin for origin in outside} == {page for page in PAGES if DOCS not in page.parents}
    listed = nav_pages(yaml.safe_load(read(ROOT / "mkdocs.yml"))["nav"])
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    notebooks = {page.relative_to(DOCS).with_suffix(".md").as_posix() for page in DOCS.rglob("*.ipynb")}
    made = notebooks | set(outside.values())
    assert not written & made
    assert sorted(listed) == sorted(written | made)


def test_every_package_has_a_page_in_the_reference():
    pages = [read(page) for page in (DOCS / "api").glob("*.md")]
    named = {module for page in pages for module in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    packages = {
        f"{folder.name}.{file.parent.name}"
        for folder in (ROOT / "trial_ray", ROOT / "envs" / "trial_envs")
        for file in folder.glob("*/__init__.py")
    }
    assert packages - named == {"trial_ray.cli"}  # docs/cli.md describes them
    for module in named:
        path = (ROOT if module.startswith("trial_ray") else ROOT / "envs").joinpath(*module.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file()


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

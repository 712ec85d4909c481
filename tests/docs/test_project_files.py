"""Pages agree with the repository: files, command lines, make targets, settings. The build of the site checks links."""

import contextlib
import io
import re
import shlex

from snippets import DOCS, snippets

from trial_ray import TRIALConfig
from trial_ray.cli import build_parser
from trial_ray.runs.experiment import experiment_file, load_experiment

PAGES = ("*.md", "docs/**/*.md", "envs/README.md", "cluster/README.md")
SHELL = re.compile(r"^```(?:bash|shell)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A word that stands for a value, such as FILE or N, and signs of an incomplete command.
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
INCOMPLETE = re.compile(r"…|\.\.\.|[\[\]|]|\bCOMMAND\b")


def commands():
    """Return the commands in shell blocks of the pages, without comments."""
    pages = (page.read_text() for pattern in PAGES for page in DOCS.parent.glob(pattern))
    lines = "\n".join(block for page in pages for block in SHELL.findall(page)).replace("\\\n", " ").splitlines()
    return {re.sub(r"\s#\s.*$", "", line).strip() for line in lines if line.strip().startswith("trial-ray ")}


def parse_error(line):
    """Return what the command-line parser prints about a command that it rejects."""
    words = ["1" if PLACEHOLDER.fullmatch(word) else word for word in shlex.split(line)[1:]]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            build_parser().parse_args(words)
        except SystemExit as stop:
            return printed.getvalue() if stop.code else ""
    return ""


def test_every_command_line_parses():
    # The value of a setting may contain any character.
    lines = [line for line in commands() if not INCOMPLETE.search(line.partition(" --set ")[0])]
    assert len(lines) > 20
    assert {line: error for line in lines if (error := parse_error(line))} == {}


def test_readme_shows_the_quickstart_settings():
    [code] = snippets("../README.md")
    exec(code, shown := {})
    quickstart = load_experiment(experiment_file("alfworld_quickstart"))
    assert shown["stop"] == quickstart.stop
    default, settings = TRIALConfig().to_dict(), quickstart.config.to_dict()
    for name, value in shown["config"].to_dict().items():
        if value != default[name]:
            found = settings[name]
            assert value.items() <= found.items() if isinstance(value, dict) else value == found, name

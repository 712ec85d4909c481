"""Where `.ci/run` takes the browser of the viewer's and the report's tests from, and what it says where it gets none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import chromium
import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "chromium"
NEEDED = ("env", "bash", "mktemp", "rm", "timeout", "grep", "tail")


@pytest.fixture
def machine(tmp_path):
    """Run the script where only the programs named are found, each with its text as its script."""

    def run(**programs):
        for name in NEEDED:
            (tmp_path / name).symlink_to(shutil.which(name))
        for name, text in programs.items():
            (tmp_path / name.replace("_", "-")).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (tmp_path / name.replace("_", "-")).chmod(0o755)
        environment = {"PATH": str(tmp_path), "CALLS": str(tmp_path / "calls")}
        done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        calls = tmp_path / "calls"
        return done.stdout, calls.read_text() if calls.exists() else ""

    return run


@pytest.mark.parametrize("name", chromium.PROGRAMS)
def test_nothing_is_installed_where_the_tests_find_a_browser(machine, name):
    told = machine(**{name.replace("-", "_"): "", "id": "echo 0", "apt_get": 'echo "$@" >> "$CALLS"'})
    assert told == ("", "")


def test_the_package_is_installed_by_root(machine):
    said, calls = machine(id="echo 0", apt_get='echo "$@" >> "$CALLS"')
    assert said.startswith("Chromium was installed")
    assert [call.partition("Retries=2 ")[2] for call in calls.splitlines()] == [
        "update",
        "install --no-install-recommends chromium",
    ]


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        ({"id": "echo 1000", "apt_get": ""}, "only root may install Debian's package `chromium`"),
        ({"id": "echo 0"}, "there is no apt-get to install it with"),
        ({"id": "echo 0", "apt_get": "echo 'E: no network'; exit 100"}, "apt-get could not install it (E: no network)"),
    ],
)
def test_it_says_why_it_could_not(machine, programs, why):
    said, _ = machine(**programs)
    assert said == f"There is no Chromium, so the tests that open pages in a browser are skipped: {why}.\n"

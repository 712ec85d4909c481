"""On a real terminal, output of libraries goes to the log, and lines of the run to the terminal."""

import io
import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from trial_ray.runs.terminal import training_progress

SESSION = """
import os, subprocess, sys
from pathlib import Path
from trial_ray.cli import console as terminal
from trial_ray.runs.terminal import library_log
from trial_ray.runs.terminal import training_progress, waiting

console = terminal.output()
sys.stdout.write("before, still buffered\\n")
try:
    with library_log(Path(sys.argv[1]), console):
        with waiting(console, "waiting"):
            print("printed while waiting")
        with training_progress(console, total=2) as progress:
            print("printed by a library")
            os.write(2, b"written by C++\\n")
            subprocess.run("echo from a child; test -t 1 && echo has a terminal", shell=True)
            progress(1, {"env_runners/success_rate": 0.5})
        assert console.is_terminal
        raise RuntimeError("it broke")
except RuntimeError as error:
    terminal.report(error, verbose=False)
print("after")
os.write(2, b"after in C++\\n")
console.print("console after")
"""


def test_a_terminal_shows_the_runs_own_lines_alone(tmp_path):
    log, output = tmp_path / "logs/libraries.log", b""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SESSION, log]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with suppress(OSError):  # on Linux, reading a closed terminal raises an error
            while piece := os.read(ours, 4096):
                output += piece
        os.close(ours)
        shown = output.decode()
        assert process.wait(timeout=60) == 0, shown
    written = log.read_text()
    assert written.splitlines() == ["printed while waiting", "printed by a library", "written by C++", "from a child"]
    for part in written.splitlines():
        assert part not in shown
    for part in (
        "before, still buffered",
        "waiting",
        "iteration 1/2",
        "it broke",
        f"libraries: {log}",
        "after in C++",
        "console after",
    ):
        assert part in shown, shown


@pytest.mark.parametrize(
    ("invalid", "cut", "advice"),
    [(1.0, 0.7, "raise max_response_tokens"), (0.5, 0.1, "look at them"), (0.4, 0.9, None)],
)
def test_unreadable_responses_cause_one_warning(invalid, cut, advice):
    shown = io.StringIO()
    metrics = {"env_runners/invalid_response_rate": invalid, "env_runners/cut_response_rate": cut}
    with training_progress(Console(file=shown), total=2) as progress:
        progress(1, metrics)
        progress(2, metrics)
    assert shown.getvalue().count("warning: ") == (advice is not None)
    assert (advice or "") in shown.getvalue()

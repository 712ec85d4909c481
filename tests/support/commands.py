"""The command line as a user calls it, and Python code: processes of their own, with a Ray of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMAND_S = 600.0
"""Longest time of a command."""


def environment(*left_out):
    """Return the variables of this process without those whose names begin with one of the words."""
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


def completed(words, timeout=COMMAND_S, **options):
    """Run a command to its end; return the completed process with what it printed."""
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)


def run_python(code, *arguments, **variables):
    """Run code in a Python process of its own, with these variables; return the completed process."""
    return completed([sys.executable, "-c", code, *arguments], env=environment("RAY_ADDRESS") | variables)


def start(*arguments):
    """Start ``trial-ray`` in a session of its own."""
    command = [str(Path(sys.executable).with_name("trial-ray")), *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=environment("RAY_ADDRESS"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(condition, process=None, within_s=COMMAND_S):
    """Wait until the condition holds, while the process runs if one is given."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def finished(*arguments, interrupt_when=None):
    """Exit code and output of a command, which gets SIGINT once ``interrupt_when`` holds."""
    process = start(*arguments)
    try:
        if interrupt_when is not None:
            wait_until(interrupt_when, process)
            process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=COMMAND_S)
    finally:
        process.kill()
    return process.returncode, printed

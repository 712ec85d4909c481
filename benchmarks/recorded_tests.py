"""Run pytest and keep what became of every test in a JSON file that is complete at any moment.

    python benchmarks/recorded_tests.py tests.json -m gpu tests

The exit status is 0 where all passed, 77 where none could run here, else 1.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from measure import environment
from stages import SKIPPED_STATUS

from trial_ray.files import write_text

MESSAGE_CHARACTERS = 2000
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


class Recorder:
    """A pytest plugin that writes outcome, seconds and message of each test to a file as it ends."""

    def __init__(self, file: Path, arguments: list[str]) -> None:
        self._file = file
        self._arguments = arguments
        self._environment = environment()
        self._collected: list[str] = []
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report, 0.0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = [item.nodeid for item in session.items]
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Fixtures speak only where they fail or skip the test.
        if report.when == "call" or not report.passed:
            self._note(report, report.duration)

    def _note(self, report: pytest.CollectReport | pytest.TestReport, seconds: float) -> None:
        message = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        self.tests[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(seconds, 3),
            "message": message[-MESSAGE_CHARACTERS:],
        }
        self.write()

    @property
    def reason(self) -> str:
        """Why no test ran; empty where one did."""
        if any(each["outcome"] != SKIPPED for each in self.tests.values()):
            return ""
        messages = Counter(each["message"].removeprefix("Skipped: ") for each in self.tests.values())
        return "; ".join(f"{message} ({count} tests)" for message, count in messages.items()) or "no test was found"

    def write(self) -> None:
        details: dict[str, Any] = {
            "arguments": self._arguments,
            "counts": dict(Counter(each["outcome"] for each in self.tests.values())),
            "tests": self.tests,
            "not_run": [name for name in self._collected if name not in self.tests],
        }
        if self._collected == list(self.tests) and self.reason:
            details["reason"] = self.reason
        record = {"measures": [], "environment": self._environment, "details": details}
        write_text(self._file, json.dumps(record, indent=2) + "\n")


def main() -> int:
    file, *arguments = sys.argv[1:]
    recorder = Recorder(Path(file), arguments)
    status = pytest.main([*arguments, "--continue-on-collection-errors", "-p", "no:cacheprovider"], plugins=[recorder])
    recorder.write()
    ran = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if ran and recorder.reason:
        return SKIPPED_STATUS
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())

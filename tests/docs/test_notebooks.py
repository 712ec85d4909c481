"""The notebook of the documentation runs as it stands."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

DOCS = Path(__file__).parents[2] / "docs"
ATTEMPTS = 3
"""A busy machine may take longer than the 30 s that Ray gives itself to start."""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_first_run_trains_looks_and_compares(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRIAL_RAY_CACHE", str(tmp_path / "cache"))
    cells = run(DOCS / "notebooks" / "first_run.ipynb", tmp_path).cells
    printed = "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))
    for part in ("trial, iteration 3: success", "trajectories won", "grpo, iteration 3: success", "same 64 tasks"):
        assert part in printed, printed


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    for attempt in range(1, ATTEMPTS + 1):
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}})
        try:
            return client.execute()
        except CellExecutionError as error:
            if attempt == ATTEMPTS or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")

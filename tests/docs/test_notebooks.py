"""The notebook of the documentation runs."""

import nbformat
import pytest
from nbclient import NotebookClient
from snippets import DOCS


@pytest.mark.long
def test_first_run_trains_and_compares(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRIAL_RAY_CACHE", f"{tmp_path}/cache")
    notebook = nbformat.read(DOCS / "notebooks/first_run.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    for part in ("trial, iteration 3: success", "trajectories won", "grpo, iteration 3: success", "same 64 tasks"):
        assert part in printed

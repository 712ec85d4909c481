"""Runs at SwanLab offline, through its own library: one that continues, another beside it refused, without secrets."""

import pytest
from tracked_runs import kept_files, log_runs


def test_swanlab_keeps_runs_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", f"{tmp_path}/home")
    log_runs("swanlab", tmp_path, [("one", (1, 2), False), ("one", (3,), True)])
    files = kept_files(tmp_path / "swanlog")
    kept = b"".join(files.values())
    assert b"env_runners/success_rate" in kept
    assert b"t0p-t0p-t0p" not in kept
    assert not [path for path in files if "requirements" in path.name]

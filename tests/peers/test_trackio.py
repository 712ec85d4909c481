"""Runs at Trackio, on this machine and through its own library: two, one of which continues, without secrets."""

import pytest
from tracked_runs import kept_files, log_runs


def test_trackio_keeps_runs_in_its_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio", exc_type=ImportError)
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    runs = [("one", (1, 2), False), ("two", (1,), False), ("one", (3,), True)]
    log_runs("trackio", tmp_path, runs, "sweep")
    storage = sqlite_storage.SQLiteStorage
    assert sorted(storage.get_runs("trial-ray")) == ["one", "two"]
    for name, expected in (("one", [1, 2, 3]), ("two", [1])):
        assert [entry["step"] for entry in storage.get_logs("trial-ray", name)] == expected
    kept = b"".join(kept_files(tmp_path / "trackio").values())
    assert b"hf_token" in kept
    assert b"t0p" not in kept
    assert capsys.readouterr().out == ""

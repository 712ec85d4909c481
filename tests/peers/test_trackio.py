"""Runs at Trackio, on this machine and through its own library: two, one of which continues, without secrets."""

import pytest

from trial_ray.runs.trackers import TrackedRun, Trackers

SETTINGS = {"settings": {"lr": 0.5, "engine_kwargs": {"hf_token": "t0p", "max_prompt_tokens": 7}}}


def test_trackio_keeps_runs_in_its_folder(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trackio", exc_type=ImportError)
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    warnings = []
    for key, iterations, resumed in (("one", (1, 2), False), ("two", (1,), False), ("one", (3,), True)):
        run = TrackedRun(f"run-{key}", key, SETTINGS, tmp_path, "sweep", resumed=resumed)
        trackers = Trackers(["trackio"], run, warnings.append)
        for iteration in iterations:
            trackers.log(iteration, {"env_runners/success_rate": 0.1 * iteration, "timestamp": 5})
        trackers.close("done")
    assert not warnings
    storage = sqlite_storage.SQLiteStorage
    assert sorted(storage.get_runs("trial-ray")) == ["one", "two"]
    for name, expected in (("one", [1, 2, 3]), ("two", [1])):
        assert [entry["step"] for entry in storage.get_logs("trial-ray", name)] == expected
    kept = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    assert b"hf_token" in kept
    assert b"t0p" not in kept
    assert capsys.readouterr().out == ""

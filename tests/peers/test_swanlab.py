"""Runs at SwanLab offline, through its own library: one that continues, another beside it refused, without secrets."""

import pytest

from trial_ray.runs.trackers import TrackedRun, Trackers

SETTINGS = {"settings": {"lr": 0.5, "engine_kwargs": {"hf_token": "t0p-t0p-t0p", "max_prompt_tokens": 7}}}


def test_swanlab_keeps_runs_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    warnings = []
    for resumed, iterations in ((False, (1, 2)), (True, (3,))):
        run = TrackedRun("run-one", "one", SETTINGS, tmp_path, resumed=resumed)
        tracker = Trackers(["swanlab"], run, warnings.append)
        for iteration in iterations:
            tracker.log(iteration, {"env_runners/success_rate": 0.1 * iteration, "timestamp": 5})
        tracker.close("interrupted" if not resumed else "done")
    assert not warnings
    files = [path for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    kept = b"".join(path.read_bytes() for path in files)
    assert b"env_runners/success_rate" in kept
    assert b"t0p-t0p-t0p" not in kept
    assert not [path for path in files if "requirements" in path.name]

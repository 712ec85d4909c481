"""What a run shows of itself to whom asks its cluster."""

from __future__ import annotations

import json

import pytest

from trial_ray import ray_internals
from trial_ray.runs.status import LOSS, RUNNING, RunStatus, StatusFile, shown_metrics

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def logs(monkeypatch, tmp_path):
    """Ray's folder of logs on a cluster with a dashboard; the session's Ray has none."""
    monkeypatch.setattr(ray_internals, "driver_place", lambda: ("http://127.0.0.1:1", tmp_path / "logs"))
    return tmp_path / "logs"


def test_a_local_ray_without_a_dashboard_is_shown_nothing(tmp_path):
    shown = StatusFile(tmp_path / "run").open()
    shown.show(done=3)
    assert (shown.dashboard, shown.job) == ("", "")
    assert ray_internals.driver_place() is None
    assert list(tmp_path.iterdir()) == []


def test_the_newest_state_is_what_is_read(logs, tmp_path):
    run = tmp_path / "a [run] \udc80\n"
    shown = StatusFile(run, total=10).open()
    for done in (1, 2):
        shown.show(state=RUNNING, done=done, seconds=2.5, metrics={LOSS: 0.5}, actors={"ab": "engine 0"})
    [file] = logs.rglob("*.json")
    assert file.stem.startswith(shown.job)
    found = RunStatus.parse(file.read_bytes())
    assert (found.run, found.done, found.seconds_left) == (str(run), 2, 20.0)
    assert found.actors == {"ab": "engine 0"}
    shown.show(state="done")
    assert RunStatus.parse(file.read_bytes()).seconds_left is None


def test_a_place_that_cannot_be_written_does_not_disturb_the_run(logs, tmp_path):
    logs.write_text("a file")
    shown = StatusFile(tmp_path / "run").open()
    shown.show(done=1)
    shown.show(metrics={LOSS: float("nan")})


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"run": "a", "mood": 1}', b"{}"])
def test_a_state_that_is_damaged_or_of_another_version_is_refused(text):
    with pytest.raises(ValueError, match=r"argument|Expecting|mapping"):
        RunStatus.parse(text)


@pytest.mark.parametrize(
    ("known", "left"),
    [
        ({"total": 10, "done": 4, "seconds": 2.0}, 12.0),
        ({"total": 10, "done": 12, "seconds": 2.0}, 0.0),
        ({"total": None, "done": 4, "seconds": 2.0}, None),
        ({"total": 10, "done": 0, "seconds": None}, None),
        ({"total": 10, "done": 4, "seconds": 2.0, "state": "failed"}, None),
    ],
)
def test_time_left(known, left):
    assert RunStatus("run", **known).seconds_left == left


def test_metrics_are_few():
    logged = {"env_runners/success_rate": 0.5, LOSS: 1.0, "seconds/sync": 3.0, "a_users_own": 2.0}
    assert shown_metrics(logged) == {"env_runners/success_rate": 0.5, LOSS: 1.0}
    assert len(json.dumps(shown_metrics(logged))) < 300

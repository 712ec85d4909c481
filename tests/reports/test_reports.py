"""Classes of decisions, means with their standard errors, windows of iterations, and the figures made of them."""

import json

import numpy as np
import pytest

from trial_ray import metrics
from trial_ray.adapters import alfworld, webshop
from trial_ray.adapters.adapter import EnvironmentAdapter
from trial_ray.errors import UserInputError
from trial_ray.reports.charts import CURVES, class_means, curve, windows
from trial_ray.runs.metrics_file import read_metrics
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn
from trial_ray.trajectory import Trajectory, Turn

HOME, SHOP = alfworld.ADAPTER, webshop.ADAPTER


@pytest.mark.parametrize(
    ("adapter", "action", "expected"),
    [
        (HOME, "take apple 1 from cabinet 1", "acquisition"),
        (HOME, "put apple 1 in/on fridge 1", "placement"),
        (HOME, "Go To fridge 1 ", "navigation"),
        (HOME, "open fridge 1", "inspection/other"),
        (HOME, "mistake apple 1", "inspection/other"),
        (SHOP, "search[red shirt]", "navigation"),
        (SHOP, "click[back to search]", "navigation"),
        (SHOP, "click[b09qxf3v3x]", "acquisition"),
        (SHOP, "click[grapefruit]", "placement"),
        (SHOP, "click[B09QXF3V3X]", "acquisition"),
        (SHOP, "click[x-large]", "placement"),
        (SHOP, "click[description]", "inspection/other"),
        (SHOP, "buy it", "inspection/other"),
        (EnvironmentAdapter("other/Env-v0"), "take x", "inspection/other"),
    ],
)
def test_classes_are_told_from_the_actions_text(adapter, action, expected):
    assert adapter.action_class(action) == expected


def trajectory(actions, ended="terminated", success=True, family="pick"):
    ids = np.zeros(1, np.int32)
    turns = [Turn(ids, ids, ids.astype(np.float32), 0, 0, "", action, True, "", 0.0, "stop") for action in actions]
    return Trajectory("t", family, 0, turns, success, float(success), ended)


def test_only_a_turn_that_ended_the_episode_is_its_completion():
    actions = ["go to shelf 1", "take cup 1 from shelf 1", "move cup 1 to desk 1"]
    assert HOME.turn_classes(actions, terminated=True) == ["navigation", "acquisition", "completion"]
    assert HOME.turn_classes(actions, terminated=False)[-1] == "placement"
    assert HOME.turn_classes([], terminated=True) == []


def trace(*turns):
    recorded = [RecordedTurn(None, name, turn_score=0.1, turn_weight=weight) for name, weight in turns]
    return RecordedTrajectory(1, 1, 0, None, recorded)


def test_only_logged_metrics_are_drawn():
    assert CURVES.keys() <= metrics.METRICS.keys()


def test_errors_are_over_trajectory_means_not_over_turns():
    traces = [
        trace(("navigation", 1.0), ("navigation", 2.0), ("completion", 0.5)),
        trace(("navigation", 3.0), ("completion", 0.7)),
        trace(("acquisition", 2.0)),
    ]
    found = class_means(traces)
    assert list(found) == ["acquisition", "navigation", "completion"]
    assert found["navigation"]["mean"] == pytest.approx(2.25)
    assert found["navigation"]["sem"] == pytest.approx(np.std([1.5, 3.0], ddof=1) / np.sqrt(2))
    assert found["navigation"]["trajectories"] == 2
    assert found["acquisition"] == {"mean": 2.0, "sem": None, "trajectories": 1}


METRICS = [{"iteration": number, "score": float(number), "loss": 1.0} for number in range(1, 13)]


def test_windows_do_not_overlap_and_the_last_may_be_shorter():
    assert windows(METRICS, "score") == {3: 3, 8: 8, 11.5: 11.5}
    assert windows(METRICS, "absent") == {}
    late = [line for line in METRICS if line["iteration"] >= 7]
    assert windows(late, "score") == {8: 8.5, 11.5: 11.5}


def test_metrics_are_read_line_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    assert curve(read_metrics(path)[0], "loss") == dict.fromkeys(range(1, 13), 1.0)
    with pytest.raises(UserInputError, match=r"absent\.jsonl"):
        read_metrics(tmp_path / "absent.jsonl")

"""Classes of actions, their mean weights, and curves over windows of iterations."""

import numpy as np
import pytest

from trial_ray import EnvironmentAdapter, metrics
from trial_ray.adapters import alfworld, webshop
from trial_ray.errors import UserInputError
from trial_ray.reports.charts import CURVES, class_means, curve, windows
from trial_ray.runs.metrics_file import read_metrics
from trial_ray.runs.recorded_trajectory import RecordedTrajectory, RecordedTurn

HOME = alfworld.ADAPTER
SHOP = webshop.ADAPTER


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (
            HOME,
            {
                "take apple 1 from cabinet 1": "acquisition",
                "put apple 1 in/on fridge 1": "placement",
                "Go To fridge 1 ": "navigation",
                "mistake apple 1": "inspection/other",
            },
        ),
        (
            SHOP,
            {
                "search[red shirt]": "navigation",
                "click[back to search]": "navigation",
                "click[B09QXF3V3X]": "acquisition",
                "click[x-large]": "placement",
                "click[description]": "inspection/other",
            },
        ),
        (EnvironmentAdapter("other/Env-v0"), {"take x": "inspection/other"}),
    ],
)
def test_action_class_follows_from_the_text(adapter, expected):
    assert {action: adapter.action_class(action) for action in expected} == expected


def test_completion_is_the_turn_that_ended_the_episode():
    actions = ["go to shelf 1", "take cup 1 from shelf 1", "move cup 1 to desk 1"]
    assert HOME.turn_classes(actions, terminated=True) == ["navigation", "acquisition", "completion"]
    assert HOME.turn_classes(actions, terminated=False)[-1] == "placement"
    assert HOME.turn_classes([], terminated=True) == []


def trace(*turns):
    recorded = [RecordedTurn(None, name, turn_weight=weight) for name, weight in turns]
    return RecordedTrajectory(1, 1, 0, None, recorded)


def test_only_logged_metrics_are_drawn():
    assert CURVES.keys() <= metrics.METRICS.keys()


def test_errors_are_over_trajectory_means():
    traces = [trace(("navigation", 1.0), ("navigation", 2.0)), trace(("navigation", 3.0)), trace(("acquisition", 2.0))]
    means = class_means(traces)
    assert [*means] == ["acquisition", "navigation"]
    sem = np.std([1.5, 3.0], ddof=1) / np.sqrt(2)
    assert means["navigation"] == {"mean": 2.25, "sem": pytest.approx(sem), "trajectories": 2}
    assert means["acquisition"] == {"mean": 2.0, "sem": None, "trajectories": 1}


METRICS = [{"iteration": number, "score": float(number), "loss": 1.0} for number in range(1, 13)]


def test_windows_do_not_overlap():
    assert windows(METRICS, "score") == {3: 3, 8: 8, 11.5: 11.5}
    assert windows(METRICS, "absent") == {}
    assert windows(METRICS[6:], "score") == {8: 8.5, 11.5: 11.5}


def test_curve_is_of_the_logged_iterations(tmp_path):
    assert curve([*METRICS, {"iteration": 13}], "loss") == dict.fromkeys(range(1, 13), 1.0)
    with pytest.raises(UserInputError):
        read_metrics(tmp_path / "absent.jsonl")

"""A run folder as a simulation reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import finished_run

from trial_ray.errors import CheckpointError, UserInputError
from trial_ray.planning.calibration import EngineSteps
from trial_ray.planning.rates import FURTHER_CORE
from trial_ray.rollout.recording import read_turns
from trial_ray.runs.recorded_workload import recorded_run, recorded_workload

STEPS = {"1": {"steps": 9, "rows": 9, "prompt_tokens": 0, "seconds": 0.1}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run whose engine reported its steps."""
    folder = finished_run(tmp_path / "run", iterations=2)
    change(folder / "run.json", schema="trial_ray/run", schema_version=1, cores=6)
    report = {"busy_seconds": 1.0, "prompt_tokens": 100, "cached_tokens": 25, "response_tokens": 9, "steps": STEPS}
    set_actors(folder, {"driver": {"host_bytes": 1}, "engine 0": report, "engine 1": None})
    return folder


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def set_actors(folder: Path, actors: dict[str, object]) -> None:
    [part] = json.loads((folder / "cost.json").read_text())["parts"]
    change(folder / "cost.json", parts=[{**part, "actors": actors}])


def test_actors_steps_and_metrics_are_those_of_the_files(run):
    found = recorded_run(run)
    settings = json.loads((run / "resolved_config.json").read_text())["settings"]
    assert found.arrangement.tasks == settings["tasks_per_iteration"]
    assert found.arrangement.learner_threads == 6  # a learner in the main process takes all cores
    assert found.arrangement.cores == 1 + 5 * FURTHER_CORE
    assert found.steps == [EngineSteps(9, 9, 0, 0.1)]
    assert found.cached_share == 0.25
    assert [each["seconds/sampling"] for each in found.iterations] == [6.0, 6.0]


def test_every_turn_has_its_lengths(run):
    workload = recorded_workload(run / "trajectories")
    turns = [turn for group in workload.groups for rollout in group for turn in rollout]
    table = read_turns(run / "trajectories")
    assert sum(turn.prompt for turn in turns) == sum(map(len, table["prompt_ids"].to_pylist()))
    assert sum(turn.response for turn in turns) == sum(map(len, table["response_ids"].to_pylist()))
    assert len(workload.groups) == len(set(table["group_id"].to_pylist()))


def test_a_run_of_two_commands_is_refused(run):
    [part] = json.loads((run / "cost.json").read_text())["parts"]
    change(run / "cost.json", parts=[part, part])
    with pytest.raises(UserInputError, match="1 commands with 2 parts"):
        recorded_run(run)


def test_steps_that_are_not_what_this_version_writes_name_the_file(run):
    set_actors(
        run, {"engine 0": {"busy_seconds": 1.0, "prompt_tokens": 1, "cached_tokens": None, "steps": {"1": {"a": 1}}}}
    )
    with pytest.raises(CheckpointError, match=r"cost\.json"):
        recorded_run(run)

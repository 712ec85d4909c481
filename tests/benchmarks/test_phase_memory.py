"""Peak memory and seconds of each phase are those of the phase."""

from __future__ import annotations

import json

import numpy as np
import phase_memory
import pytest
from phase_memory import PhaseMeter
from small_learners import learner_of, update, weights
from synthetic_groups import synthetic_groups

MIB = 2**20


@pytest.fixture
def learner(model_path):
    return learner_of("grpo", model_path, minibatch_rows=8, microbatch_rows=4)


GROUPS = synthetic_groups(vocab_size=400, num_groups=2, group_size=4, seed=3)


def test_a_phases_peak_is_its_own(learner, tmp_path):
    file, finished_rows, so_far = tmp_path / "example.json", learner._finished_rows, []
    step = learner._optimizer_step

    def scoring_with_much_memory(*args):
        np.ones(300 * MIB, np.uint8)
        return finished_rows(*args)

    def step_that_looks(*args):
        so_far.append(json.loads(file.read_text())["details"])
        return step(*args)

    learner._finished_rows, learner._optimizer_step = scoring_with_much_memory, step_that_looks
    meter = PhaseMeter(learner, file)
    update(learner, GROUPS)
    phases = meter.finish()
    assert list(phases) == ["sampling", "scoring", "update", "sync"]
    peaks = {name: phase["host_peak"] for name, phase in phases.items()}
    if None not in peaks.values():  # a system that cannot start the peak again
        assert peaks["scoring"] > 250 * MIB + max(peaks["sampling"], peaks["update"], peaks["sync"])
    assert all(phase["seconds"] > 0 for phase in phases.values())
    # A process that is killed in the update leaves what went before, and how far it came.
    assert len(so_far) > 1
    assert so_far[-1]["unfinished"] == "update"
    assert set(so_far[-1]["phases"]) == {"sampling", "scoring"}
    assert so_far[-1]["update"]["steps_done"] == len(so_far) - 1
    assert so_far[-1]["update"]["steps"] == len(so_far)
    assert so_far[-1]["update"]["expected_seconds"] > so_far[-1]["update"]["seconds"]


def test_a_measured_update_is_the_same_update(model_path):
    found = []
    for measured in (False, True):
        learner = learner_of("grpo", model_path, minibatch_rows=8, microbatch_rows=4)
        meter = PhaseMeter(learner, None) if measured else None
        update(learner, GROUPS)
        if meter is not None:
            meter.finish()
            update(learner, GROUPS, iteration=2)
            assert list(meter.phases) == ["sampling", "scoring", "update", "sync"]
        else:
            update(learner, GROUPS, iteration=2)
        found.append(weights(learner))
    assert (found[0] == found[1]).all()


def test_a_peak_that_cannot_start_again_is_not_given(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(phase_memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    meter = PhaseMeter(learner, None)
    assert [phase["host_peak"] for phase in meter.finish().values()] == [None]

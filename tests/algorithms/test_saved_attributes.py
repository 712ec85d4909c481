"""What an iteration changes in learner, health checks and samplers is continued from a checkpoint, or a reason says why not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_learners import learner_of, update
from synthetic_groups import synthetic_groups
from test_group_sampler import PlayedWorkers, sampler
from test_guards import guards, judge

PLAIN = (int, float, str, bool, type(None), list, tuple, dict, set, torch.dtype)
HELD = {"config", "_config", "_method", "method"}
"""What no iteration changes."""
NOT_SAVED = {
    "learner": {
        "weight_version": "given with each update",
        "trained_groups": "of the last update, for its record alone",
        "update_rows": "set before each update",
        "passes": "of the last update's passes alone",
    },
    "guards": {"_verdict": "follows from what is saved and the present settings"},
    "sampler": {
        "_in_flight": "groups in flight are played again; their requests are saved",
        "_tasks._orders": "follow from the seed",
        "_next_index": "tells groups of this process apart",
        "_iteration": "given with each call",
        "_rows_in_flight": "rows in flight are played again",
    },
}
"""Attributes that are not saved, by the object."""


def attributes(owner: Any, path: str = "", seen: frozenset[int] = frozenset()) -> dict[str, str]:
    """Every plain attribute of an object, and of those of this package that it holds, by its path."""
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, PLAIN):
            found[path + name] = repr(value)
        elif type(value).__module__.startswith("trial_ray") and not (
            name in HELD or id(value) in seen or isinstance(value, torch.nn.Module)
        ):
            found |= attributes(value, f"{path}{name}.", seen | {id(owner)})
    return found


def check(kind: str, before: dict[str, str], changed: Any, continued: Any) -> set[str]:
    """All that changed is the same where it is continued, but for what has a reason; returns the former."""
    after, restored = attributes(changed), attributes(continued)
    moved = {path for path, value in after.items() if before.get(path) != value}
    excused = {path for path in moved if any(path.startswith(name) for name in NOT_SAVED[kind])}
    lost = {path for path in moved - excused if restored.get(path) != after[path]}
    assert not lost, "an iteration changes it, and a checkpoint lacks it"
    idle = {name for name in NOT_SAVED[kind] if not any(path.startswith(name) for path in moved)}
    assert not idle, "nothing changes these"
    return moved - excused


@pytest.fixture(scope="module")
def groups():
    return synthetic_groups(vocab_size=400)


def test_what_an_update_changes_in_the_learner_is_saved(model_path, groups, tmp_path: Path, monkeypatch):
    def made():
        return learner_of("serl", model_path, teacher_sync_iterations=2, max_skipped_updates=9, minibatch_rows=1000)

    learner = made()
    before = attributes(learner)
    update(learner, groups, 3, weight_version=2, num_env_steps_sampled_lifetime=5)
    with monkeypatch.context() as patch:
        patch.setattr(
            type(learner), "_exchanged_gradients", lambda self: dict.fromkeys(self._params, torch.tensor(math.nan))
        )
        update(learner, groups, 4, weight_version=3, num_env_steps_sampled_lifetime=9)
    learner.save_to_path(tmp_path / "checkpoint")
    by_file, by_state = made(), made()
    by_file.restore_from_path(tmp_path / "checkpoint")
    by_state.set_state(learner.get_state())
    for continued in (by_file, by_state):
        saved = check("learner", before, learner, continued)
        assert {"iteration", "env_steps", "teacher_renewed_in", "skipped_in_a_row", "_weights_seq_no"} <= saved
    assert by_file.skipped_in_a_row == 1


def test_what_an_iteration_changes_in_the_health_checks_is_saved():
    made = guards(guard_patience=2)
    before = attributes(made)
    for iteration in (1, 2):
        judge(made, iteration, {"total_loss": math.nan, "grpo/entropy": 1.0 / iteration**20})
    assert "_in_a_row" in check("guards", before, made, guards(made, guard_patience=2))


def test_what_an_iteration_changes_in_a_sampler_is_saved():
    workers = PlayedWorkers()
    overlapping = sampler(workers, max_staleness=1)
    before = attributes(overlapping)
    for iteration in (1, 2, 3):
        workers.version += 1
        overlapping.sample(iteration)
    overlapping.note_effective_sample_size(0.0)
    continued = sampler(PlayedWorkers(), max_staleness=1)
    continued.set_state(overlapping.get_state())
    assert "_on_policy_next" in check("sampler", before, overlapping, continued)

"""Sampling while the learner updates, with a real env runner, engine and learner: no assertion is about time."""

from __future__ import annotations

import pytest
import ray
from tiny_run import with_small_actors, with_small_games

from trial_ray.algorithms import GRPOConfig
from trial_ray.rollout.trajectory import TrajectoryGroup

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def overlapping_config(model_path: str) -> GRPOConfig:
    return (
        with_small_games(with_small_actors(GRPOConfig()), max_turns=4, num_tasks=2)
        .rl_module(model_path=model_path)
        .training(lr=1e-3, group_size=3, tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, kl_coeff=0.0)
        .training(importance_cap=2.0)
        # One rollout at a time, so that groups are still played when the first ones are trained on.
        .env_runners(max_response_tokens=16, max_staleness=1, max_episodes_in_flight=1)
        .engines(engine_kwargs={"max_model_len": 508})
    )


class TrainedGroups:
    """What each update of an algorithm was given."""

    def __init__(self, algo, monkeypatch) -> None:
        self.versions: list[int] = []
        self.groups: list[list[TrajectoryGroup]] = []
        self._algo, self._update = algo, algo._update
        monkeypatch.setattr(algo, "_update", self.update)

    def update(self, samples) -> None:
        self.versions.append(self._algo.weight_version)
        self.groups.append([ray.get(sample.group) for sample in samples])
        self._update(samples)

    @property
    def tasks(self) -> list[str]:
        return [group.task_id for groups in self.groups for group in groups]


def test_groups_go_on_under_new_weights_and_a_resumed_run_trains_each_task_once(
    algorithm_of, model_path, tmp_path, monkeypatch
):
    algo = algorithm_of(overlapping_config(model_path))
    trained = TrainedGroups(algo, monkeypatch)
    order = [request.task_id for request in type(algo.tasks)(algo.tasks._task_ids, 1).draw(14, 3)]
    results = [algo.train() for _ in range(3)]
    assert len(algo.evaluate_panels()["ALFWorld-v0"].episodes) == 2
    algo.save_to_path(str(tmp_path / "checkpoint"))
    in_flight = algo.sampler.get_state()["returned"]
    assert len(in_flight) == 2
    results.append(algo.train())  # its updates are lost with the interruption
    del trained.versions[3:], trained.groups[3:]
    algo.restore_from_path(str(tmp_path / "checkpoint"))
    results += [algo.train() for _ in range(3)]
    for version, groups in zip(trained.versions, trained.groups, strict=True):
        sampled_by = [turn.weight_version for group in groups for each in group.trajectories for turn in each.turns]
        assert version - 1 <= min(sampled_by) <= max(sampled_by) <= version
    assert any(result["groups"]["num_of_several_versions"] for result in results), "no group saw two versions"
    assert any(result["learners"]["default_policy"]["rows"]["staleness_max"] == 1 for result in results)
    assert len(set(trained.tasks)) == len(trained.tasks) == 12
    assert sorted({*trained.tasks, *(flight["task_id"] for flight in algo.sampler.get_state()["returned"])}) == sorted(
        order
    )
    _check_counts(results[:4])
    _check_counts(results[4:])


def _check_counts(results) -> None:
    in_flight = 0
    for result in results:
        rows, groups = result["rows"], result["groups"]
        parts = ("given_to_learners", "left_out", "redrawn", "stale", "in_flight")
        assert rows["sampled"] == sum(rows[name] for name in parts) - in_flight
        assert groups["num_stale"] == 0
        assert groups["num_in_flight"] == 2
        assert 0 < float(result["learners"]["default_policy"]["engine"]["effective_sample_size"]) <= 1
        in_flight = rows["in_flight"]

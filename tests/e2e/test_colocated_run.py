"""Engine and learner on one device: who has it when, in training with real actors."""

import itertools

import pytest
import ray
from tiny_run import games_config

from trial_ray.errors import CheckpointError, LearnerError
from trial_ray.process import STEP
from trial_ray.runs.metrics_file import flatten

pytestmark = pytest.mark.e2e


def test_engine_and_learner_take_turns_on_one_bundle(ray_session, model_path, tmp_path):
    algo = (
        games_config(model_path, max_turns=2, num_tasks=2, group_size=2)
        .env_runners(num_env_runners=0, max_response_tokens=4)
        .engines(colocate=True)
        .learners(num_learners=1, num_cpus_per_learner=0.5)
        .build_algo()
    )

    def bundle_of(*_):
        """Bundle of the placement group in which an actor runs."""
        names = ray.get_runtime_context().worker.core_worker.resource_ids()
        return [name for name in names if name.startswith("bundle_group_0_")]

    try:
        group, learners = algo.pairs, algo.learner_group
        [engine] = algo.engine_pool.handles
        [learner] = learners._workers
        assert len(group.bundle_specs) == 1
        bundles = ray.get([engine.__ray_call__.remote(bundle_of), learner.apply.remote(bundle_of)], timeout=60)
        assert bundles == [[f"bundle_group_0_{group.id.hex()}"]] * 2
        metrics = flatten(algo.train())
        found = [event for actor in algo.timeline().actors.values() for event in actor.events]
        turns = (STEP, "sleep", "optimizer step", "wake", "load weights")
        names = [event.name for event in sorted(found, key=lambda event: event.began) if event.name in turns]
        assert [name for name, _ in itertools.groupby(names)] == [*turns, "wake"]
        [evaluated] = algo.evaluate_sets().values()
        assert len(evaluated.counted) == 2
        assert metrics["learners/default_policy/engine/logprob_diff"] < 1e-5
        assert metrics["groups/num_trained"] == 2

        file = tmp_path / "learner/optimizer.pt"
        learners.save_to_path(tmp_path)
        file.unlink()
        with pytest.raises(CheckpointError):
            learners.restore_from_path(tmp_path)
        learners._worker_manager.set_actor_state(0, healthy=True)
        file.mkdir()  # cannot be written
        with pytest.raises(LearnerError):
            learners.save_to_path(tmp_path)
    finally:
        algo.stop()
    assert ray.util.placement_group_table(group)["state"] == "REMOVED"

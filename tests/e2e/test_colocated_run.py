"""Engine and learner on one device: who has it when, in training with real actors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ray
from nano_model import save_nano_model
from tiny_run import with_small_actors, with_small_games

from trial_ray.algorithms import TRIALConfig
from trial_ray.algorithms.learner_group import PolicyLearnerGroup
from trial_ray.engines import requirements
from trial_ray.engines.transformers import TransformersEngine
from trial_ray.errors import CheckpointError, LearnerError, TrainingDivergedError

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("ray_session")]


def colocated_config(model_path: str) -> TRIALConfig:
    return (
        with_small_games(with_small_actors(TRIALConfig()), max_turns=2, num_tasks=2)
        .rl_module(model_path=model_path)
        .training(group_size=2, tasks_per_iteration=2, minibatch_rows=12, microbatch_rows=6, ref_kl_coeff=0.0, lr=1e-2)
        .env_runners(max_response_tokens=4)
        .engines(colocate=True)
        .env_runners(num_env_runners=0)
        .learners(num_learners=1, num_cpus_per_learner=0.5)
    )


def recording_engine() -> type:
    """The transformers engine, noting when it did what."""

    # Defined here so that it travels to the actor by value.
    class RecordingEngine(TransformersEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.events = []

        def _step(self, joining):
            self.events += [("generate", time.monotonic())] * len(joining)
            return super()._step(joining)

        def _sleep(self, level):
            self.events.append((f"sleep {level}", time.monotonic()))
            super()._sleep(level)

        def _wake(self, part):
            self.events.append((f"wake {part}", time.monotonic()))
            super()._wake(part)

        def _replace_weights(self, weights):
            self.events.append(("load", time.monotonic()))
            return super()._replace_weights(weights)

        async def take_events(self):
            events, self.events = self.events, []
            return events

    return RecordingEngine


def test_engine_and_learner_take_turns_on_one_bundle(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(requirements, "engine_class", lambda name: recording_engine())
    config = colocated_config(str(save_nano_model(tmp_path / "nano")))
    algo = config.build_algo()
    learning, made_update = [], PolicyLearnerGroup.update

    def noted_update(learners, **arguments):
        learning.append(("update", time.monotonic()))
        results = made_update(learners, **arguments)
        learning.append(("updated", time.monotonic()))
        return results

    def happened() -> list[str]:
        [engine] = algo.engine_pool.handles
        events = sorted([*ray.get(engine.take_events.remote(), timeout=60), *learning], key=lambda event: event[1])
        learning.clear()
        names = [name for name, _ in events]
        return [name for index, name in enumerate(names) if [name] != names[index - 1 : index]]

    monkeypatch.setattr(PolicyLearnerGroup, "update", noted_update)

    def bundle_of(*_) -> list[str]:
        """Bundle of the placement group in which this actor runs."""
        names = ray.get_runtime_context().worker.core_worker.resource_ids()
        return [name for name in names if name.startswith("bundle_group_0_")]

    turns = ["sleep 2", "update", "updated", "wake weights", "load", "wake cache"]
    try:
        [engine] = algo.engine_pool.handles
        [learner] = algo.learner_group._workers
        assert len(algo.pairs.bundle_specs) == 1
        bundles = ray.get([engine.__ray_call__.remote(bundle_of), learner.apply.remote(bundle_of)], timeout=60)
        assert bundles == [[f"bundle_group_0_{algo.pairs.id.hex()}"]] * 2
        assert happened() == ["sleep 2", "wake weights", "load", "wake cache"]
        first = algo.train()
        assert happened() == ["generate", *turns]
        assert len(next(iter(algo.evaluate_sets().values())).counted) == 2
        second = algo.train()
        assert happened() == ["generate", *turns]
        for result in (first, second):
            assert float(result["learners"]["default_policy"]["engine"]["logprob_diff"]) < 1e-5
        assert second["groups"]["num_trained"] == 2
        hindsight = [result["learners"]["default_policy"]["trial"] for result in (first, second)]
        assert [each["returns_fallen"] for each in hindsight] == [0, 0]
        assert hindsight[1]["return_recent"] == hindsight[1]["return_before"] == 0
        assert "with λ the mean return" not in caplog.text

        def diverge(learners, **arguments):
            raise TrainingDivergedError("gradients were not finite")

        monkeypatch.setattr(PolicyLearnerGroup, "update", diverge)
        with pytest.raises(TrainingDivergedError, match="not finite"):
            algo.train()
        assert happened() == ["generate", "sleep 2"]

        file = Path(algo.learner_group.save_to_path(str(tmp_path / "saved"))) / "learner" / "optimizer.pt"
        file.unlink()
        with pytest.raises(CheckpointError, match=r"1 of 1 learners could not load .*the error is logged above"):
            algo.learner_group.restore_from_path(str(tmp_path / "saved"))
        algo.learner_group._worker_manager.set_actor_state(0, healthy=True)
        file.mkdir()  # cannot be written
        with pytest.raises(LearnerError, match="1 of 1 learners failed while they saved"):
            algo.learner_group.save_to_path(str(tmp_path / "saved"))
        group = algo.pairs
    finally:
        algo.stop()
    assert ray.util.placement_group_table(group)["state"] == "REMOVED"

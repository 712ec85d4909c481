"""Data-parallel learners are one learner: the same weights after an update, every row trained once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner_group import LearnerGroup

from trial_ray.algorithms import TRIALConfig
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.recording import read_training
from trial_ray.rollout.env_runner import TextEnvRunner

pytestmark = pytest.mark.actors


@pytest.fixture(scope="module")
def model_path(exact_model_path):
    return exact_model_path


@pytest.fixture(scope="module")
def groups():
    """Fewer groups than the most learners, and trajectories of 1 to 7 turns."""
    from synthetic_groups import synthetic_groups

    return synthetic_groups(vocab_size=400, num_groups=2, group_size=5, most_turns=7, seed=11)


def updated(model_path: str, groups, num_learners: int, folder: Path) -> tuple[torch.Tensor, list[dict]]:
    """All weights after one update, the same on every learner, and each learner's metrics; rows are recorded in ``folder``."""
    config = (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path=model_path, model_dtype="float64")
        .training(
            lr=1e-3, minibatch_rows=10, microbatch_rows=8, kl_coeff=0.01, entropy_coeff=0.001, max_logprob_gap=100.0,
            hindsight_coeff=0.3, hindsight_start_iteration=1, clamp_scope="minibatch", max_tokens_per_forward=400,
        )
        .learners(num_learners=num_learners, num_cpus_per_learner=0.5)
        .recording(training_folder=str(folder))
    )  # fmt: skip
    spec = config.get_multi_rl_module_spec(spaces=TextEnvRunner.get_spaces(None))
    learners = LearnerGroup(config=config, module_spec=spec)
    try:
        results = learners.update(
            training_data=TrainingGroups(episodes_refs=[ray.put([group]) for group in groups]),
            timesteps={"training_iteration": 1},
        )

        # A nested function travels by value; this module is not known to the actors.
        def all_weights(learner):
            weights = [tensor.reshape(-1).double() for _, tensor in learner.policy_module.named_weights()]
            return torch.cat(weights).cpu()

        weights = [each.get() for each in learners.foreach_learner(all_weights)]
    finally:
        learners.shutdown()
    assert all(torch.equal(each, weights[0]) for each in weights)
    return weights[0], [each[DEFAULT_MODULE_ID] for each in results]


def test_several_learners_come_to_the_weights_of_one(ray_session, model_path, groups, tmp_path):
    alone, _ = updated(model_path, groups, 0, tmp_path / "alone")
    together, metrics = updated(model_path, groups, 3, tmp_path / "together")
    error = ((together - alone).norm() / alone.norm()).item()
    print(f"relative difference of the weights {error:.1e}")  # shown by pytest -rP
    assert error < 1e-12
    num_rows = sum(len(trajectory.turns) for group in groups for trajectory in group.survivors)
    trained = [int(each["num_module_steps_trained"]) for each in metrics]
    assert sum(trained) == num_rows
    # Minibatches have one microbatch or two: a third learner has none and takes part with nothing.
    assert sorted(count > 0 for count in trained) == [False, True, True]
    assert len({float(each["trial"]["dense_loss"]) for each in metrics}) == 1
    assert_same_record(tmp_path / "together", tmp_path / "alone", num_rows)


def assert_same_record(folder: Path, other: Path, num_rows: int) -> None:
    """Several learners write every row once, with the numbers that one writes."""
    keys = ["group_id", "rollout_index", "turn_index"]
    assert len(list(folder.glob("*/*.parquet"))) > 1
    found, expected = (read_training(each).to_pandas().sort_values(keys) for each in (folder, other))
    assert len(found) == num_rows
    assert (found[keys].to_numpy() == expected[keys].to_numpy()).all()
    for name in ("gap", "learner_logprobs", "evidence_ids"):
        ours, theirs = (np.concatenate(list(frame[name])) for frame in (found, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for name in ("turn_score", "turn_weight", "advantage"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4)

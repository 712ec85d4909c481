"""Several learners are one learner: the same weights after an update, every row trained once.

Learners that hold a part of the weights each are so, too; what they save is continued, exported and sent whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import ray
import small_learners
import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.learner_group import LearnerGroup
from small_learners import SPACES, build_learner, update, weights
from synthetic_groups import synthetic_groups
from transformers import AutoModelForCausalLM

from trial_ray.algorithms import TRIALConfig
from trial_ray.engines.weights import iter_weights, weights_checksum
from trial_ray.errors import CheckpointError, ConfigError
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.recording import read_training
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.models.sharding import decoder_layers

NUM_LEARNERS = 2


def config_of(model_path: str, num_learners: int, sharding: str = "none", fsdp_size: int | None = None) -> TRIALConfig:
    return (
        TRIALConfig()
        .environment("trial/ALFWorld-v0")
        .rl_module(model_path=model_path, model_dtype="float64", sharding=sharding, fsdp_size=fsdp_size)
        .training(
            lr=1e-3, minibatch_rows=10, microbatch_rows=8, ref_kl_coeff=0.01, entropy_coeff=0.001, max_logprob_diff=100.0,
            hindsight_coeff=0.3, hindsight_start_iteration=1, max_tokens_per_forward=60,
        )
        .learners(num_learners=num_learners, num_cpus_per_learner=0.5)
    )  # fmt: skip


@pytest.fixture(scope="module")
def groups():
    """Trajectories of 1 to 7 turns: learners have unequal numbers of forward and backward passes."""
    return synthetic_groups(vocab_size=400, num_groups=2, group_size=5, most_turns=7, seed=11)


def group_of(config: TRIALConfig) -> LearnerGroup:
    return config.build_learner_group(spaces=SPACES)


def on_all(learners: LearnerGroup, function) -> list:
    answers = []
    for result in learners.foreach_learner(function):
        if not result.ok:
            raise result.get()
        answers.append(result.get())
    return answers


def whole_weights(learners: LearnerGroup) -> torch.Tensor:
    # Nested functions travel by value; this module is not known to the actors.
    def gather(learner):
        return torch.cat([tensor.reshape(-1) for _, tensor in learner.policy_module.named_weights()])

    first, *others = on_all(learners, gather)
    assert all(torch.equal(each, first) for each in others)
    return first


def optimizer_elements(learners: LearnerGroup) -> list[int]:
    def count(learner):
        (optimizer,) = learner._named_optimizers.values()
        return sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())

    return on_all(learners, count)


def train(learners: LearnerGroup, groups, iteration: int = 1) -> list[dict]:
    """Each learner's metrics."""
    data = TrainingGroups(episodes_refs=[ray.put(group) for group in groups])
    results = learners.update(training_data=data, timesteps={"training_iteration": iteration})
    return [each[DEFAULT_MODULE_ID] for each in results]


def assert_a_state_is_gone_on_from(learners: LearnerGroup, groups) -> None:
    """With other weights in between; with the optimizers' moments, as the next update is the same bit for bit."""
    before, state = whole_weights(learners), learners.get_state()
    train(learners, groups, 2)
    after = whole_weights(learners)
    assert not torch.equal(after, before)
    weights = learners.get_weights()
    np.testing.assert_array_equal(np.concatenate([each.ravel() for each in weights[DEFAULT_MODULE_ID].values()]), after)
    zeros = {name: np.zeros_like(each) for name, each in weights[DEFAULT_MODULE_ID].items()}
    learners.set_weights({DEFAULT_MODULE_ID: zeros})
    assert not whole_weights(learners).any()
    for wrong in (dict(list(zeros.items())[1:]), {**zeros, "other": np.zeros(1)}, dict.fromkeys(zeros, 0.0)):
        with pytest.raises(CheckpointError, match=r"lacks 1 of|1 unknown|has shape \[\]"):
            learners.set_weights({DEFAULT_MODULE_ID: wrong})
    learners.set_state(state)
    assert torch.equal(whole_weights(learners), before)
    train(learners, groups, 2)
    assert torch.equal(whole_weights(learners), after)


@pytest.mark.long
@pytest.mark.actors
def test_several_learners_come_to_the_weights_of_one_and_write_every_row_once(
    ray_session, exact_model_path, groups, tmp_path
):
    """Gradients are cut into many sums; of minibatches with one microbatch or two one learner at least has none."""

    def sum_in_small_buckets(learner):
        from trial_ray.learner import exchange

        exchange.BUCKET_ELEMENTS = 1000
        learner.gradient_sums = exchange.GradientSums(learner.policy_module.policy_parameters())
        learner.passes._before_last = learner.gradient_sums.begin

    found, metrics = {}, {}
    for number in (0, 3):
        config = config_of(exact_model_path, number).training(max_tokens_per_forward=100)
        learners = group_of(config.recording(training_folder=str(tmp_path / str(number))))
        if number:
            on_all(learners, sum_in_small_buckets)
        metrics[number] = train(learners, groups)
        found[number] = whole_weights(learners)
        assert_a_state_is_gone_on_from(learners, groups)
        learners.shutdown()
    assert (found[3] - found[0]).norm() < 1e-12 * found[0].norm()
    num_rows = sum(map(len, groups))
    assert sum(int(each["num_module_steps_trained"]) for each in metrics[3]) == num_rows
    assert len({float(each["trial"]["dense_loss"]) for each in metrics[3]}) == 1
    assert_same_record(tmp_path / "3", tmp_path / "0", num_rows)


@pytest.mark.long
@pytest.mark.actors
@pytest.mark.parametrize("method", ["serl", "opsd"])
def test_what_a_method_needs_of_turns_reaches_the_learners_that_train_them(ray_session, exact_model_path, method):
    """SERL masks tokens by texts; OPSD's divergence scores the hindsight view of trained turns."""
    tokenizer = load_tokenizer(exact_model_path)
    said = [
        np.array(tokenizer.encode(text), np.int32)
        for text in ("we <action>look</action>", "look", "<action>go to</action>")
    ]
    games = synthetic_groups(vocab_size=400, num_groups=3, group_size=4, most_turns=6, seed=5, responses=said)
    found = []
    for number in (0, NUM_LEARNERS):
        config = small_learners.config_of(
            method, exact_model_path, lr=1e-3, minibatch_rows=12, microbatch_rows=3, model_dtype="float64"
        )
        learners = group_of(config.learners(num_learners=number, num_cpus_per_learner=0.5))
        metrics = train(learners, games)
        found.append(
            (
                whole_weights(learners),
                float(metrics[0][method]["action_token_fraction" if method == "serl" else "dense_loss"]),
            )
        )
        learners.shutdown()
    (alone, told), (shared, told_by_several) = found
    assert (shared - alone).norm() < 1e-10 * alone.norm()
    assert told_by_several == pytest.approx(told)
    assert told > 0


def assert_same_record(folder: Path, other: Path, num_rows: int) -> None:
    """Several learners write every row once, with the numbers that one writes."""
    keys = ["group_id", "rollout_index", "turn_index"]
    assert len(list(folder.glob("*/*.parquet"))) > 1
    found, expected = (read_training(each, 1).to_pandas().sort_values(keys) for each in (folder, other))
    assert len(found) == num_rows
    assert (found[keys].to_numpy() == expected[keys].to_numpy()).all()
    for name in ("gap", "learner_logprobs", "evidence_ids"):
        ours, theirs = (np.concatenate(list(frame[name])) for frame in (found, expected))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for name in ("turn_score", "turn_weight", "advantage"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4)


@pytest.mark.long
@pytest.mark.actors
def test_sharded_learners_train_save_export_and_go_on_as_one(ray_session, model_path, groups, tmp_path):
    sharded = group_of(config_of(model_path, NUM_LEARNERS, "fsdp"))
    alone = build_learner(config_of(model_path, 0))
    first = weights(alone)
    update(alone, groups, 1)
    train(sharded, groups, 1)
    trained = whole_weights(sharded)
    assert (trained - weights(alone)).norm() < 1e-10 * trained.norm()
    assert (trained - first).norm() > 1e-3 * first.norm()
    elements = optimizer_elements(sharded)
    assert sum(elements) == trained.numel()
    assert max(elements) < 0.6 * trained.numel()

    folder = Path(sharded.save_to_path(str(tmp_path / "group"))) / "learner"
    hf = folder / "rl_module" / "default_policy" / "hf"
    exported = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float64)
    assert torch.equal(torch.cat([each.detach().reshape(-1) for each in exported.parameters()]), trained)
    exports = on_all(sharded, lambda learner: learner.export_weights(2, "float32"))
    (shards,) = [each for each in exports if each is not None]
    assert (
        weights_checksum(iter_weights(shards))
        == shards.checksum
        == weights_checksum(exported.float().named_parameters())
    )

    train(sharded, groups, 2)
    uninterrupted = whole_weights(sharded)
    sharded.restore_from_path(str(tmp_path / "group"))
    assert torch.equal(whole_weights(sharded), trained)
    train(sharded, groups, 2)
    assert torch.equal(whole_weights(sharded), uninterrupted)
    assert_a_state_is_gone_on_from(sharded, groups)
    with pytest.raises(CheckpointError, match="written with sharding='fsdp'"):
        alone.restore_from_path(folder)
    # Saved in a folder that some learner does not see, nothing is written.
    with pytest.raises(CheckpointError, match="file system that all of them share"):
        on_all(sharded, lambda learner: learner.save_shards(tmp_path / "missing"))
    sharded.shutdown()


@pytest.mark.actors
@pytest.mark.long
def test_two_sharded_copies_are_one_learner(ray_session, model_path, groups):
    """Two by two learners."""
    sharded = group_of(config_of(model_path, 4, "fsdp", 2).learners(num_cpus_per_learner=0.25))
    alone = build_learner(config_of(model_path, 0))
    update(alone, groups, 1)
    train(sharded, groups, 1)
    trained = whole_weights(sharded)
    assert (trained - weights(alone)).norm() < 1e-10 * trained.norm()
    assert sum(optimizer_elements(sharded)) == 2 * trained.numel()
    sharded.shutdown()


def test_what_cannot_be_sharded_is_refused(model_path):
    with pytest.raises(ConfigError, match="num_learners is 1; expected at least 2"):
        config_of(model_path, 1, "fsdp").validate()
    for sharding in ("fsdp", "none"):
        with pytest.raises(ConfigError, match=r"fsdp_size is 3 with sharding.*divisor of num_learners"):
            config_of(model_path, 4, sharding, 3).validate()
    lm = load_causal_lm(model_path, "float32")
    lm._no_split_modules = ["OtherLayer"]
    with pytest.raises(ConfigError, match=r"No decoder layers were found .*\['OtherLayer'\]"):
        decoder_layers(lm)

"""Several learners, also with sharded weights, compute the same update as one learner, and record every row once.

Sharded learners save, restore, export and send whole weights.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import ray
import small_learners
import torch
from nano_model import save_exact_model
from ray.rllib.core import DEFAULT_MODULE_ID
from rejections import misconfigured, rejected
from small_learners import build_learner, update, weights
from synthetic_groups import synthetic_groups
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM

from trial_ray.engines.weights import iter_weights, weights_checksum
from trial_ray.learner.exchange import TrainingGroups
from trial_ray.learner.recording import read_training
from trial_ray.models.loading import load_causal_lm, load_tokenizer
from trial_ray.models.sharding import decoder_layers
from trial_ray.prompts.teacher_context import add_teacher_contexts


def config_of(model_path, num_learners, sharding="none", fsdp_size=None, method="trial"):
    own = {
        "trial": {"hindsight_coeff": 0.3},
        "opd": {"teacher_model": f"{model_path}-teacher", "teacher_context": "outcome"},
    }.get(method, {})
    config = small_learners.config_of(
        method, model_path, model_dtype="float64", sharding=sharding, fsdp_size=fsdp_size, lr=1e-3, minibatch_rows=10,
        microbatch_rows=8, ref_kl_coeff=0.01, max_tokens_per_forward=60, **own,
    )  # fmt: skip
    return config.learners(num_learners=num_learners, num_cpus_per_learner=0.25)


@pytest.fixture(scope="module")
def groups(tokenizer):
    """Trajectories of 1 to 7 turns: learners have unequal numbers of forward and backward passes."""
    texts = ("we <action>look</action>", "look", "<action>go to</action>")
    responses = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    return synthetic_groups(num_groups=2, group_size=5, max_turns=7, seed=11, responses=responses)


def on_all(learners, function):
    results = list(learners.foreach_learner(function))
    for failed in (result for result in results if not result.ok):
        raise failed.get()
    return [result.get() for result in results]


def whole_weights(learners):
    # Nested functions travel by value; this module is not known to the actors.
    def gather(learner):
        return torch.cat([tensor.reshape(-1) for _, tensor in learner.policy_module.named_weights()])

    first, *others = on_all(learners, gather)
    assert all(torch.equal(other, first) for other in others)
    return first


def train(learners, groups, iteration=1):
    """Each learner's metrics."""
    tokenizer = load_tokenizer(learners.config.model_path)
    for group in groups:
        add_teacher_contexts(group, learners.config, tokenizer)
    data = TrainingGroups(episodes_refs=[ray.put(group) for group in groups])
    results = learners.update(training_data=data, timesteps={"training_iteration": iteration})
    return [result[DEFAULT_MODULE_ID] for result in results]


def assert_training_continues_from_a_state(learners, groups):
    """Load other weights in between; the next update is the same bit for bit, so the optimizers' moments are restored too."""
    before, state = whole_weights(learners), learners.get_state()
    train(learners, groups, 2)
    after = whole_weights(learners)
    assert not torch.equal(after, before)
    weights = learners.get_weights()[DEFAULT_MODULE_ID]
    np.testing.assert_array_equal(np.concatenate([*map(np.ravel, weights.values())]), after)
    zeros = {name: 0 * array for name, array in weights.items()}
    learners.set_weights({DEFAULT_MODULE_ID: zeros})
    assert not whole_weights(learners).any()
    for wrong in (dict([*zeros.items()][1:]), zeros | {"other": np.zeros(1)}, dict.fromkeys(zeros, 0.0)):
        rejected(r"lacks 1 of|1 unknown|has shape \[\]", learners.set_weights, {DEFAULT_MODULE_ID: wrong})
    learners.set_state(state)
    assert torch.equal(whole_weights(learners), before)
    train(learners, groups, 2)
    assert torch.equal(whole_weights(learners), after)


@pytest.mark.long
@pytest.mark.actors
@pytest.mark.parametrize(
    ("method", "metric"),
    [("trial", "dense_loss"), ("serl", "action_token_fraction"), ("opsd", "dense_loss"), ("opd", "dense_loss")],
)
def test_several_learners_compute_and_record_what_one_does(
    method, metric, ray_session, exact_model_path, groups, tmp_path
):
    """Gradients are summed in many buckets, and some learners have no microbatch of a minibatch.

    SERL masks tokens by their texts; OPSD's divergence scores the teacher context in the training pass, OPD's teacher is another
    model.
    """
    save_exact_model(Path(f"{exact_model_path}-teacher"), seed=1)

    def sum_in_small_buckets(learner):
        from trial_ray.learner import exchange

        exchange.BUCKET_ELEMENTS = 1000
        learner.gradient_sums = exchange.GradientSums(learner.get_parameters(learner.policy_module))
        learner.passes.before_last = learner.gradient_sums.begin

    weights, metrics = {}, {}
    for number in (0, 3):
        config = config_of(exact_model_path, number, method=method).training(max_tokens_per_forward=100)
        learners = config.recording(training_folder=f"{tmp_path}/{number}").build_learner_group()
        if number:
            on_all(learners, sum_in_small_buckets)
        metrics[number] = train(learners, groups)
        weights[number] = whole_weights(learners)
        if method == "trial":
            assert_training_continues_from_a_state(learners, groups)
        learners.shutdown()
    assert (weights[3] - weights[0]).norm() < 1e-10 * weights[0].norm()
    num_rows = sum(map(len, groups))
    assert sum(int(own["num_module_steps_trained"]) for own in metrics[3]) == num_rows
    (expected,), logged = ({float(own[method][metric]) for own in metrics[number]} for number in (0, 3))
    assert expected != 0
    assert [*logged] == [pytest.approx(expected)]
    # Several learners write every row once, with the numbers of one learner.
    assert len([*tmp_path.glob("3/*/*.parquet")]) > 1
    keys = ["group_id", "rollout_index", "turn_index"]
    record, expected = (
        read_training(tmp_path / number, 1).to_pandas().set_index(keys).sort_index() for number in ("3", "0")
    )
    assert len(record) == num_rows
    pd.testing.assert_frame_equal(record, expected, atol=1e-5, rtol=1e-7)


@pytest.mark.long
@pytest.mark.actors
@pytest.mark.parametrize("copies", [1, 2])
def test_sharded_learners_train_save_export_and_restore_as_one(ray_session, copies, model_path, groups, tmp_path):
    """Two learners share the weights of a copy."""

    def optimizer_elements(learner):
        (optimizer,) = learner._named_optimizers.values()
        return sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())

    sharded = config_of(model_path, 2 * copies, "fsdp", 2).build_learner_group()
    alone = build_learner(config_of(model_path, 0))
    first = weights(alone)
    update(alone, groups, 1)
    train(sharded, groups, 1)
    trained = whole_weights(sharded)
    assert (trained - weights(alone)).norm() < 1e-10 * trained.norm()
    assert (trained - first).norm() > 1e-3 * first.norm()
    elements = on_all(sharded, optimizer_elements)
    assert sum(elements) == copies * trained.numel()
    assert max(elements) < 0.6 * trained.numel()

    folder = Path(sharded.save_to_path(f"{tmp_path}/group")) / "learner"
    exported = AutoModelForCausalLM.from_pretrained(folder / "rl_module/default_policy/hf", dtype=torch.float64)
    assert torch.equal(parameters_to_vector(exported.parameters()), trained)
    (shards,) = filter(None, on_all(sharded, lambda learner: learner.export_weights(2, "float32")))
    expected = weights_checksum(exported.float().named_parameters())
    assert weights_checksum(iter_weights(shards)) == shards.checksum == expected

    train(sharded, groups, 2)
    uninterrupted = whole_weights(sharded)
    sharded.restore_from_path(f"{tmp_path}/group")
    assert torch.equal(whole_weights(sharded), trained)
    train(sharded, groups, 2)
    assert torch.equal(whole_weights(sharded), uninterrupted)
    assert_training_continues_from_a_state(sharded, groups)
    rejected("sharding='fsdp'", alone.restore_from_path, folder)
    # Nothing is written to a folder that some learner cannot access.
    rejected("cannot access", on_all, sharded, lambda learner: learner.save_shards(tmp_path / "missing"))
    sharded.shutdown()


def test_impossible_sharding_is_refused(model_path):
    misconfigured("num_learners is 1", config_of(model_path, 1, "fsdp").validate)
    for sharding in ("fsdp", "none"):
        misconfigured("fsdp_size is 3", config_of(model_path, 4, sharding, 3).validate)
    lm = load_causal_lm(model_path, "float32")
    lm._no_split_modules = ["OtherLayer"]
    misconfigured("OtherLayer", decoder_layers, lm)

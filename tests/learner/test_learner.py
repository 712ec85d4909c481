"""The learner without actors: what an update does to the weights, and what it must not depend on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_learners
import torch
from safetensors.torch import load_file, save_file
from small_learners import update, weights
from synthetic_groups import synthetic_groups

from trial_ray.errors import CheckpointError, PolicyBrokenError, TrainingDivergedError
from trial_ray.learner.learner import GRPOLearner
from trial_ray.learner.state import OPTIMIZER_FILE, load_optimizers, save_optimizers, save_shards

SETTINGS = {"lr": 1e-2, "ref_kl_coeff": 0.0, "entropy_coeff": 0.0, "minibatch_rows": 16, "microbatch_rows": 8}


def learner_of(model_path: str, method: str = "trial", **settings) -> GRPOLearner:
    return small_learners.learner_of(method, model_path, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def groups():
    return synthetic_groups(vocab_size=400)


def test_reference_divergence_starts_at_zero_and_grows(model_path, groups):
    learner = learner_of(model_path, "grpo", ref_kl_coeff=0.01, minibatch_rows=1000)
    first = update(learner, groups)
    second = update(learner, groups)
    assert abs(float(first["grpo"]["kl"])) < 1e-6
    assert float(second["grpo"]["kl"]) > 1e-6


def optimizer_settings(learner: GRPOLearner) -> list[tuple]:
    (optimizer,) = learner._named_optimizers.values()
    return [(float(each["lr"]), tuple(each["betas"]), each["weight_decay"]) for each in optimizer.param_groups]


def test_settings_that_were_changed_act_from_the_first_update_after_a_checkpoint(model_path, groups, tmp_path):
    schedule = [[0, 1e-2], [100, 0.0]]
    learner = learner_of(model_path, lr=schedule)
    for iteration in (1, 2):
        update(learner, groups, iteration, num_env_steps_sampled_lifetime=20 * iteration)
    learner.save_to_path(tmp_path / "checkpoint")
    same = learner_of(model_path, lr=schedule)
    same.restore_from_path(tmp_path / "checkpoint")
    assert optimizer_settings(same) == optimizer_settings(learner)
    assert same.method.state == learner.method.state
    assert learner.method.state["return_before"], "there is a state to restore"
    changed = {"lr": [[0, 2e-2], [100, 0.0]], "adam_betas": (0.5, 0.6), "weight_decay": 0.3}
    other = learner_of(model_path, **changed)
    other.restore_from_path(tmp_path / "checkpoint")
    assert optimizer_settings(other) == [(pytest.approx(2e-2 * 0.6), (0.5, 0.6), 0.3)]


def test_checkpoint_without_weights_is_refused(model_path, tmp_path):
    learner = learner_of(model_path)
    learner.save_to_path(tmp_path / "checkpoint")
    for file in (tmp_path / "checkpoint").rglob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        learner_of(model_path).restore_from_path(tmp_path / "checkpoint")


def test_a_checkpoint_is_not_continued_by_a_model_of_the_same_shapes(model_path, tmp_path):
    learner = learner_of(model_path)
    learner.save_to_path(tmp_path / "checkpoint")

    def refused(path, message, **settings) -> None:
        other = learner_of(path, **settings)
        before = weights(other)
        with pytest.raises(CheckpointError, match=message):
            other.restore_from_path(tmp_path / "checkpoint")
        assert torch.equal(weights(other), before)

    def changed(name, change) -> str:
        file = Path(shutil.copytree(model_path, tmp_path / name)) / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return str(file.parent)

    def swap_two_tokens(tokenizer) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        first, second, *_ = vocabulary
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    refused(model_path, "is float32, and bfloat16 would round it. Set model_dtype", model_dtype="bfloat16")
    other_norm = changed("config.json", lambda config: config.update(rms_norm_eps=0.1))
    refused(other_norm, r"rms_norm_eps is 1e-06 \(now 0.1\)")
    refused(changed("tokenizer.json", swap_two_tokens), "another vocabulary")
    saved = tmp_path / "checkpoint" / "rl_module" / "default_policy" / "hf" / "model.safetensors"
    save_file({**load_file(saved), "lm_head.bias": torch.zeros(1)}, saved, metadata={"format": "pt"})
    refused(model_path, "1 tensors that the model does not have, the first being 'lm_head.bias'")


def test_updates_that_are_not_finite_are_skipped_and_counted_then_stop_the_run_also_a_resumed_one(
    model_path, groups, monkeypatch, tmp_path
):
    settings = {"method": "grpo", "max_skipped_updates": 3, "minibatch_rows": 1000}
    learner = learner_of(model_path, **settings)
    before = weights(learner)
    monkeypatch.setattr(
        "trial_ray.learner.method.clipped_surrogate",
        lambda logprobs, *args, **kwargs: (logprobs * torch.nan).mean(),
    )
    for _ in range(2):
        results = update(learner, groups)
        assert float(results["skipped_updates"]) == 1
    assert torch.equal(weights(learner), before)
    learner.save_to_path(tmp_path / "checkpoint")
    resumed = learner_of(model_path, **settings)
    resumed.restore_from_path(tmp_path / "checkpoint")
    with pytest.raises(TrainingDivergedError, match="not finite in 3 updates"):
        update(resumed, groups)


@pytest.mark.parametrize("damage", [float("nan"), 1e30])
def test_weights_that_give_no_probabilities_are_not_trained_on(damage, model_path, groups):
    learner = learner_of(model_path)
    with torch.no_grad():
        next(iter(learner.policy_module.policy_parameters())).fill_(damage)
        for each in learner.policy_module.policy_parameters():
            each.mul_(damage if damage == 1e30 else 1)
    before = weights(learner)
    with pytest.raises(PolicyBrokenError, match=r"logprobs of \d+ of \d+ sampled tokens are not finite"):
        update(learner, groups)
    assert torch.equal(weights(learner).nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(("broken", "minibatch_rows"), [("weights", 1000), ("weights", 16), ("log-probabilities", 16)])
def test_a_policy_that_a_step_breaks_is_neither_saved_nor_sent_also_when_the_next_ones_are_skipped(
    broken, minibatch_rows, model_path, groups, monkeypatch
):
    """Finite weights may overflow in the forward pass; other policies that diverge are saved aside."""
    learner = learner_of(model_path, max_skipped_updates=1, minibatch_rows=minibatch_rows)
    apply, forward = learner.apply_gradients, learner.policy_module.forward_train

    def overflow(gradients):
        apply(gradients)
        if broken == "weights":
            learner.policy_module.policy_parameters()[-1].data.view(-1)[-1] = torch.inf
        else:
            spoilt = lambda batch: {name: each * torch.nan for name, each in forward(batch).items()}  # noqa: E731
            monkeypatch.setattr(learner.policy_module, "forward_train", spoilt)

    monkeypatch.setattr(learner, "apply_gradients", overflow)
    with pytest.raises(PolicyBrokenError, match=rf"(?i){broken}.* not( finite)?"):
        update(learner, groups)


def test_rewards_without_bounds_are_not_trained_on(model_path):
    groups = synthetic_groups(vocab_size=400, num_groups=1)
    groups[0].trajectories[0].score = 1e308
    learner = learner_of(model_path, "grpo", reward="score", reward_scale=10.0)
    before = weights(learner)
    with pytest.raises(TrainingDivergedError, match=r"earned inf \(score times reward_scale=10\)"):
        update(learner, groups)

    def prepare(rows, groups, iteration):
        rows.advantages = rows.advantages * torch.nan
        return {}

    groups[0].trajectories[0].score = 1.0
    learner.method.prepare = prepare
    with pytest.raises(TrainingDivergedError, match=r"advantages of (\d+) of \1 turns are not finite"):
        update(learner, groups)
    assert torch.equal(weights(learner), before)


def stepped(seed: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(3, 2)
    made = torch.optim.AdamW(layer.parameters())
    layer(torch.randn(3)).sum().backward()
    made.step()
    return made


def test_a_state_that_is_damaged_in_one_optimizer_is_taken_over_by_none(tmp_path):
    states = {name: stepped(seed).state_dict() for seed, name in enumerate(("first", "second"))}
    state = states["second"]["state"][0]
    state["rtep"] = state.pop("step")
    torch.save({"sharded": False, "iteration": 7, "optimizers": states}, tmp_path / OPTIMIZER_FILE)
    into = {"first": stepped(2), "second": stepped(3)}
    before = {name: repr(optimizer.state_dict()) for name, optimizer in into.items()}
    with pytest.raises(CheckpointError, match="damaged, or was written for other optimizers"):
        load_optimizers(into, None, tmp_path)
    assert {name: repr(optimizer.state_dict()) for name, optimizer in into.items()} == before


def test_a_shard_that_cannot_be_read_leaves_the_optimizer_as_it_is(tmp_path):
    def stepped(value):
        parameters = [torch.nn.Parameter(torch.full((4096,), value)) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters)
        sum(parameter.square().sum() for parameter in parameters).backward()
        optimizer.step()
        return {"adamw": optimizer}, {parameter: str(index) for index, parameter in enumerate(parameters)}

    saved, names = stepped(2.0)
    save_optimizers(saved, 7, tmp_path, sharded=True)
    save_shards(saved, names, tmp_path)
    into, names = stepped(3.0)
    whole, _ = stepped(3.0)
    assert load_optimizers(into, names, tmp_path) == 7
    assert repr(into["adamw"].state_dict()) == repr(saved["adamw"].state_dict())
    [file] = tmp_path.glob("optimizer/*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    into, names = stepped(3.0)
    with pytest.raises(CheckpointError, match="damaged"):
        load_optimizers(into, names, tmp_path)
    assert repr(into["adamw"].state_dict()) == repr(whole["adamw"].state_dict())

"""The learner without actors: its metrics, checkpoints, optimizer files, and updates that are not finite."""

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
    return synthetic_groups()


def test_reference_divergence_starts_at_zero_and_grows(model_path, groups):
    learner = learner_of(model_path, "grpo", ref_kl_coeff=0.01, minibatch_rows=1000)
    first = update(learner, groups)
    second = update(learner, groups)
    assert abs(float(first["grpo"]["kl"])) < 1e-6
    assert float(second["grpo"]["kl"]) > 1e-6


def optimizer_settings(learner: GRPOLearner) -> list[tuple]:
    (optimizer,) = learner._named_optimizers.values()
    return [(float(group["lr"]), tuple(group["betas"]), group["weight_decay"]) for group in optimizer.param_groups]


def test_changed_optimizer_settings_act_after_a_checkpoint(model_path, groups, tmp_path):
    schedule = [[0, 1e-2], [100, 0.0]]
    learner = learner_of(model_path, lr=schedule)
    for iteration in (1, 2):
        update(learner, groups, iteration, num_env_steps_sampled_lifetime=20 * iteration)
    learner.save_to_path(tmp_path)

    def restored(**settings):
        other = learner_of(model_path, **settings)
        other.restore_from_path(tmp_path)
        return other

    same = restored(lr=schedule)
    assert optimizer_settings(same) == optimizer_settings(learner)
    assert same.method.state == learner.method.state
    assert learner.method.state["return_before"]
    changed = restored(lr=[[0, 2e-2], [100, 0.0]], adam_betas=(0.5, 0.6), weight_decay=0.3)
    assert optimizer_settings(changed) == [(pytest.approx(2e-2 * 0.6), (0.5, 0.6), 0.3)]


def test_a_checkpoint_of_another_model_is_refused(model_path, tmp_path):
    """Also if all shapes are the same; the weights stay unchanged."""
    checkpoint = tmp_path / "checkpoint"
    learner_of(model_path).save_to_path(checkpoint)

    def refused(path, message, **settings) -> None:
        other = learner_of(str(path), **settings)
        before = weights(other)
        with pytest.raises(CheckpointError, match=message):
            other.restore_from_path(checkpoint)
        assert torch.equal(weights(other), before)

    def changed(name, change) -> Path:
        file = Path(shutil.copytree(model_path, tmp_path / name)) / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return file.parent

    def swap_two_tokens(tokenizer) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        first, second, *_ = vocabulary
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    refused(model_path, "model_dtype", model_dtype="bfloat16")
    refused(changed("config.json", lambda config: config.update(rms_norm_eps=0.1)), "rms_norm_eps")
    refused(changed("tokenizer.json", swap_two_tokens), "vocabulary")
    saved = checkpoint / "rl_module" / "default_policy" / "hf" / "model.safetensors"
    save_file({**load_file(saved), "lm_head.bias": torch.zeros(1)}, saved, metadata={"format": "pt"})
    refused(model_path, "lm_head.bias")
    saved.unlink()
    refused(model_path, "safetensors")


def test_nonfinite_updates_are_skipped_and_end_the_run(model_path, groups, monkeypatch, tmp_path):
    """Their number is part of the checkpoint."""
    settings = {"method": "grpo", "max_skipped_updates": 3, "minibatch_rows": 1000}
    learner, resumed = learner_of(model_path, **settings), learner_of(model_path, **settings)
    before = weights(learner)
    monkeypatch.setattr("trial_ray.learner.method.surrogate_mean", lambda losses, *_: (losses * torch.nan).mean())
    for _ in range(2):
        assert float(update(learner, groups)["skipped_updates"]) == 1
    assert torch.equal(weights(learner), before)
    learner.save_to_path(tmp_path)
    resumed.restore_from_path(tmp_path)
    with pytest.raises(TrainingDivergedError, match="Gradients"):
        update(resumed, groups)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_weights_that_give_no_probabilities_are_not_trained_on(damage, model_path, groups):
    learner = learner_of(model_path)
    learner.policy_module.policy_parameters()[0].data.fill_(damage)
    before = weights(learner)
    with pytest.raises(PolicyBrokenError, match="sampled tokens"):
        update(learner, groups)
    assert torch.equal(weights(learner).nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("broken", "minibatch_rows"), [("weights are", 1000), ("weights are", 16), ("weights give", 16)]
)
def test_a_policy_that_a_step_breaks_is_neither_saved_nor_sent(broken, minibatch_rows, model_path, groups, monkeypatch):
    """Also if the next steps are skipped, and if finite weights overflow in the forward pass."""
    learner = learner_of(model_path, max_skipped_updates=1, minibatch_rows=minibatch_rows)
    apply, forward = learner.apply_gradients, learner.policy_module.forward_train

    def overflow(gradients):
        apply(gradients)
        if broken == "weights are":
            learner.policy_module.policy_parameters()[-1].data.view(-1)[-1] = torch.inf
        else:
            spoilt = lambda batch: {name: value * torch.nan for name, value in forward(batch).items()}  # noqa: E731
            monkeypatch.setattr(learner.policy_module, "forward_train", spoilt)

    monkeypatch.setattr(learner, "apply_gradients", overflow)
    with pytest.raises(PolicyBrokenError, match=rf"(?i){broken}"):
        update(learner, groups)


def test_infinite_rewards_and_advantages_are_not_trained_on(model_path):
    groups = synthetic_groups(num_groups=1)
    groups[0].trajectories[0].score = 1e308
    learner = learner_of(model_path, "grpo", reward="score", reward_scale=10.0)
    before = weights(learner)
    with pytest.raises(TrainingDivergedError, match="earned inf"):
        update(learner, groups)

    def prepare(rows, groups, iteration):
        rows.advantages = rows.advantages * torch.nan
        return {}

    groups[0].trajectories[0].score, learner.method.prepare = 1.0, prepare
    with pytest.raises(TrainingDivergedError, match="advantages"):
        update(learner, groups)
    assert torch.equal(weights(learner), before)


# --- files of optimizers


def stepped(value: float) -> tuple[dict[str, torch.optim.Optimizer], dict[torch.Tensor, str]]:
    """Return an optimizer after a step, and the names of its parameters."""
    parameters = [torch.nn.Parameter(torch.full((4096,), value)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.square().sum() for parameter in parameters).backward()
    optimizer.step()
    return {"adamw": optimizer}, {parameter: str(index) for index, parameter in enumerate(parameters)}


def states(optimizers) -> dict[str, str]:
    return {name: repr(optimizer.state_dict()) for name, optimizer in optimizers.items()}


def test_a_damaged_state_of_one_optimizer_changes_none(tmp_path):
    optimizers = {"first": stepped(0.0)[0]["adamw"], "second": stepped(1.0)[0]["adamw"]}
    saved = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    state = saved["second"]["state"][0]
    state["rtep"] = state.pop("step")
    torch.save({"sharded": False, "iteration": 7, "optimizers": saved}, tmp_path / OPTIMIZER_FILE)
    into = {"first": stepped(2.0)[0]["adamw"], "second": stepped(3.0)[0]["adamw"]}
    before = states(into)
    with pytest.raises(CheckpointError):
        load_optimizers(into, None, tmp_path)
    assert states(into) == before


def test_a_shard_that_cannot_be_read_changes_no_optimizer(tmp_path):
    saved, names = stepped(2.0)
    save_optimizers(saved, 7, tmp_path, sharded=True)
    save_shards(saved, names, tmp_path)
    into, names = stepped(3.0)
    assert load_optimizers(into, names, tmp_path) == 7
    assert states(into) == states(saved)
    [file] = tmp_path.glob("optimizer/*.distcp")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    into, names = stepped(3.0)
    before = states(into)
    with pytest.raises(CheckpointError):
        load_optimizers(into, names, tmp_path)
    assert states(into) == before

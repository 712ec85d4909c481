"""The learner without actors: its metrics, checkpoints, optimizer files, and updates that are not finite."""

import math
import shutil
from pathlib import Path

import pytest
import small_learners
import torch
from rejections import rejected
from safetensors.torch import load_file, save_file
from small_learners import refuses, unchanged, update
from synthetic_groups import synthetic_groups

from trial_ray.errors import PolicyBrokenError, TrainingDivergedError
from trial_ray.learner.state import OPTIMIZER_FILE, load_optimizers, save_optimizers, save_shards

SETTINGS = {"lr": 1e-2, "ref_kl_coeff": 0.0, "minibatch_rows": 16, "microbatch_rows": 8}
GROUPS = synthetic_groups()


def learner_of(model_path, method="trial", **settings):
    return small_learners.learner_of(method, model_path, **SETTINGS | settings)


def optimizer_settings(learner):
    (optimizer,) = learner._named_optimizers.values()
    return [(float(group["lr"]), tuple(group["betas"]), group["weight_decay"]) for group in optimizer.param_groups]


def test_changed_optimizer_settings_act_after_a_checkpoint(model_path, tmp_path):
    schedule = [[0, 1e-2], [100, 0.0]]
    learner = learner_of(model_path, lr=schedule)
    for iteration in (1, 2):
        update(learner, GROUPS, iteration, num_env_steps_sampled_lifetime=20 * iteration)
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

    def refused(path, message, **settings):
        other = learner_of(str(path), **settings)
        with unchanged(other):
            rejected(message, other.restore_from_path, checkpoint)

    def changed(name, old, new):
        file = Path(shutil.copytree(model_path, tmp_path / name)) / name
        file.write_text(file.read_text().replace(old, new))
        return file.parent

    refused(model_path, "model_dtype", model_dtype="bfloat16")
    refused(changed("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'), "rms_norm_eps")
    refused(changed("tokenizer.json", '"countertop"', '"counterpot"'), "vocabulary")
    saved = checkpoint / "rl_module/default_policy/hf/model.safetensors"
    save_file(load_file(saved) | {"lm_head.bias": torch.zeros(1)}, saved, metadata={"format": "pt"})
    refused(model_path, "lm_head.bias")
    saved.unlink()
    refused(model_path, "safetensors")


def test_nonfinite_updates_are_skipped_and_end_the_run(model_path, monkeypatch, tmp_path):
    """Their number is part of the checkpoint."""
    settings = {"method": "grpo", "max_skipped_updates": 3, "minibatch_rows": 1000}
    learner, resumed = learner_of(model_path, **settings), learner_of(model_path, **settings)
    monkeypatch.setattr("trial_ray.learner.method.surrogate_mean", lambda losses, *_: (losses * torch.nan).mean())
    with unchanged(learner):
        for _ in range(2):
            assert float(update(learner, GROUPS)["skipped_updates"]) == 1
    learner.save_to_path(tmp_path)
    resumed.restore_from_path(tmp_path)
    with pytest.raises(TrainingDivergedError, match="Gradients"):
        update(resumed, GROUPS)


def test_weights_that_give_no_probabilities_are_not_trained_on(model_path):
    learner = learner_of(model_path)
    learner.get_parameters(learner.policy_module)[0].data.fill_(torch.inf)
    refuses(learner, GROUPS, PolicyBrokenError, "sampled tokens")


def break_after_a_step(broken, learner):
    """After an optimizer step, one of the weights is infinite, or the weights give log-probabilities of NaN."""
    module, apply = learner.policy_module, learner.apply_gradients
    forward = module.forward_train

    def apply_and_break(gradients):
        apply(gradients)
        if broken == "weights are":
            learner.get_parameters(module)[-1].data.view(-1)[-1] = torch.inf
        else:
            module.forward_train = lambda batch: {name: value * torch.nan for name, value in forward(batch).items()}

    learner.apply_gradients = apply_and_break


@pytest.mark.parametrize("broken", ["weights are", "weights give"])
def test_a_policy_that_a_step_breaks_is_neither_saved_nor_sent(broken, model_path):
    """Also if the next steps are skipped, and if finite weights overflow in the forward pass."""
    learner = learner_of(model_path, max_skipped_updates=1)
    break_after_a_step(broken, learner)
    with pytest.raises(PolicyBrokenError, match=rf"(?i){broken}"):
        update(learner, GROUPS)


def test_the_distance_of_an_update_is_measured_after_its_last_step(model_path):
    none, near, far = (
        float(update(learner_of(model_path, lr=lr), GROUPS)["grpo"]["update_kl"]) for lr in (0.0, 1e-5, 1e-3)
    )
    assert none == pytest.approx(0, abs=1e-9)
    assert 1e-9 < near < far
    learner = learner_of(model_path, minibatch_rows=1000)
    break_after_a_step("weights give", learner)
    assert math.isnan(float(update(learner, GROUPS)["grpo"]["update_kl"]))


def test_undefined_advantages_are_not_trained_on(model_path):
    def prepare(rows, *_):
        rows.advantages = rows.advantages * torch.nan
        return {}

    learner = learner_of(model_path, "grpo")
    learner.method.prepare = prepare
    refuses(learner, GROUPS, TrainingDivergedError, "advantages")


# --- files of optimizers


def stepped(value):
    """Return two optimizers after a step, and the names of their parameters."""
    names = {torch.nn.Parameter(torch.full((4096,), value)): name for name in ("first", "second")}
    optimizers = {name: torch.optim.AdamW([parameter]) for parameter, name in names.items()}
    sum(parameter.square().sum() for parameter in names).backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return optimizers, names


def states(optimizers):
    return {name: repr(optimizer.state_dict()) for name, optimizer in optimizers.items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_state_of_one_optimizer_changes_none(sharded, tmp_path):
    saved, names = stepped(2.0)
    save_optimizers(saved, 7, tmp_path, sharded=sharded)
    if sharded:
        save_shards(saved, names, tmp_path)
    into, names = stepped(3.0)
    before, names = states(into), names if sharded else None
    assert load_optimizers(into, names, tmp_path) == 7
    assert states(into) == states(saved) != before
    if sharded:
        [file] = tmp_path.glob("optimizer/*.distcp")
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    else:
        content = torch.load(tmp_path / OPTIMIZER_FILE, weights_only=True)
        del content["optimizers"]["second"]["state"][0]["step"]
        torch.save(content, tmp_path / OPTIMIZER_FILE)
    into, names = stepped(3.0)
    rejected(None, load_optimizers, into, names if sharded else None, tmp_path)
    assert states(into) == before

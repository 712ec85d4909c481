"""LoRA: only adapters are trained; the base model is the reference, and engines get the merged model."""

import pytest
import torch
from rejections import misconfigured, rejected
from small_learners import config_of, learner_of, unchanged, update, weights
from synthetic_groups import synthetic_groups
from transformers import AutoModelForCausalLM

from trial_ray.runs.checkpoints import CHECKPOINT_MARK, export_model

TRAINING = {"lr": 1e-2, "minibatch_rows": 16, "microbatch_rows": 8, "lora_rank": 4}
GROUPS = synthetic_groups(num_groups=2, seed=11)


def logits_of(lm):
    with torch.no_grad():
        return lm(input_ids=torch.arange(20, 60)[None]).logits


def save(learner, folder):
    """Save a learner as the checkpoint of a run, and return the checkpoint."""
    learner.save_to_path(folder / "learner_group/learner")
    (folder / CHECKPOINT_MARK).touch()
    return folder


@pytest.fixture(scope="module")
def trained(model_path):
    """Return a learner after two updates that have trained only its adapters."""
    learner = learner_of("grpo", model_path, **TRAINING)

    def parameters(adapters):
        """Return copies of the adapters' parameters, or of all others."""
        named = learner.policy_module.lm.named_parameters()
        return {name: value.clone() for name, value in named if (".lora_" in name) == adapters}

    before = parameters(adapters=False)
    first, second = (float(update(learner, GROUPS, iteration)["grpo"]["kl"]) for iteration in (1, 2))
    assert first == 0 < 1e-6 < second
    torch.testing.assert_close(parameters(adapters=False), before, atol=0, rtol=0)
    adapters = parameters(adapters=True)
    assert all(value.abs().max() > 0 for value in adapters.values())
    (optimizer,) = learner._named_optimizers.values()
    names = learner.policy_module.parameter_names()
    assert {names[parameter] for parameter in optimizer.state} == adapters.keys()
    return learner


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory):
    return save(trained, tmp_path_factory.mktemp("run") / "000002")


def test_the_reference_is_the_base_model(trained, model_path):
    with trained.policy_module.reference_model() as reference:
        assert torch.equal(logits_of(reference), logits_of(AutoModelForCausalLM.from_pretrained(model_path)))


def test_the_merged_model_and_the_adapter_are_exported(trained, checkpoint, model_path, tmp_path):
    from peft import PeftModel

    expected = logits_of(trained.policy_module.lm)
    merged = AutoModelForCausalLM.from_pretrained(export_model(checkpoint, tmp_path / "merged"))
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    base = AutoModelForCausalLM.from_pretrained(model_path)
    assert not torch.allclose(logits_of(base), expected, atol=1e-3)
    adapted = PeftModel.from_pretrained(base, export_model(checkpoint, tmp_path / "adapter", adapter=True))
    for exported in (merged, adapted):
        torch.testing.assert_close(logits_of(exported), expected, atol=1e-5, rtol=0)


def test_training_continues_from_a_restored_adapter(trained, checkpoint, model_path):
    restored = learner_of("grpo", model_path, **TRAINING)
    restored.restore_from_path(checkpoint / "learner_group/learner")
    assert torch.equal(weights(restored), weights(trained))
    update(restored, GROUPS, 3)
    (optimizer,) = restored._named_optimizers.values()
    steps = -(-sum(map(len, GROUPS)) // TRAINING["minibatch_rows"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {3 * steps}


@pytest.mark.parametrize("settings", [{"lora_alpha": 16.0}, {"lora_targets": ["q_proj"]}])
def test_a_checkpoint_of_other_adapters_is_refused(checkpoint, model_path, settings):
    other = learner_of("grpo", model_path, **TRAINING | settings)
    with unchanged(other):
        rejected(next(iter(settings)), other.restore_from_path, checkpoint / "learner_group/learner")


def test_impossible_adapters_are_refused(model_path, tmp_path):
    misconfigured(r"wq.*down_proj", learner_of, "grpo", model_path, lora_rank=4, lora_targets=["wq"])
    misconfigured("lora_rank", config_of("grpo", model_path, lora_targets=["q_proj"]).validate)
    misconfigured("stale copy", config_of("opsd", model_path, lora_rank=4, teacher_sync_iterations=1).validate)
    whole = save(learner_of("grpo", model_path), tmp_path / "000001")
    rejected("all weights", export_model, whole, tmp_path / "adapter", adapter=True)

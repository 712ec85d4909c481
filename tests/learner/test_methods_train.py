"""Every method takes real updates on a small model; hooks of a user's own method are called or refused."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nano_model import save_nano_model
from ray import cloudpickle
from rejections import misconfigured
from scored_rows import Row, own_scores
from small_learners import build_learner, config_of, gradients, refuses, trained, update, weights, worst
from snippets import DOCS
from synthetic_groups import changed, synthetic_groups
from torch.nn.utils import parameters_to_vector

from trial_ray.algorithms.methods import method_names, method_of, with_method
from trial_ray.errors import MethodError
from trial_ray.learner.method import Divergence, Method
from trial_ray.learner.rows import group_turn_rows
from trial_ray.models.loading import load_causal_lm

PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python title=\"(\w+)\.py\"\n(.*?)```", PAGE, re.DOTALL))
TRAINING = {"lr": 1e-2, "ref_kl_coeff": 0.0, "entropy_coeff": 0.0, "weight_decay": 0.0, "microbatch_rows": 4}
ACTIVE = {"hindsight_start_iteration": 1, "hindsight_coeff": 0.5, "clamp_alpha": 1e6}
"""Settings with which TRIAL's dense term has an effect in the first update."""


@pytest.fixture
def groups(tokenizer):
    texts = [f"<think>{thought}</think><action>{action}</action>" for thought in "ab" for action in ("look", "go to x")]
    responses = [np.array([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32) for text in texts]
    return synthetic_groups(num_groups=2, group_size=3, max_turns=3, responses=responses, seed=1)


def learner_of(method, model_path, **training):
    """Build a learner of a method or of a method's file."""
    own = ACTIVE if method in ("trial", "uniform", "permuted") else {}
    if method == "opd":
        own = {"teacher_model": f"{Path(model_path).parent}/teacher"}
    config = with_method(config_of("trial", model_path, **TRAINING), method).training(**own, **training)
    config.validate()
    return build_learner(config)


@pytest.fixture(scope="module", autouse=True)
def teacher_path(model_path):
    """A wider model than the policy, whose embedding is padded to another size."""
    folder = save_nano_model(Path(model_path).parent / "teacher", seed=1, size="tiny")
    lm = load_causal_lm(str(folder), "float32")
    lm.resize_token_embeddings(lm.config.vocab_size + 3)
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", [*method_names(), "opsd-sampled", "opd-jsd"])
def test_every_method_trains(method, model_path, groups):
    name, _, divergence = method.partition("-")
    learner = learner_of(name, model_path, **({"divergence": divergence} if divergence else {}))
    results = trained(learner, groups)
    logged = {key: float(value) for key, value in results.get(learner.method.name, {}).items()}
    assert np.isfinite([*logged.values()]).all(), logged
    if name == "serl":
        assert 0.05 < logged["action_token_fraction"] < 0.9


def test_the_divergence_is_that_of_the_sampled_policies(model_path, groups):
    """OPSD's temperature divides the logits of the tempered policy once more, so only their product counts."""

    def step(temperature, divergence):
        learner = build_learner(config_of("opsd", model_path, **TRAINING, jsd_temperature=divergence, grad_clip=None))
        return gradients(learner, changed(groups, lambda *_: {"temperature": temperature}))

    once = step(1.0, 0.6)
    assert worst(step(0.5, 1.2), once) < 1e-5
    assert worst(step(1.0, 1.2), once) > 1e-2


# --- teachers


def test_teacher_model_scores_what_its_own_forward_pass_does(model_path, groups, teacher_path):
    learner = learner_of("opd", model_path)
    rows, _ = learner.scoring.scored_rows(groups, 1, None)
    turns = [Row(turn.prompt_ids, 0, turn.response_ids) for turn in rows.turns]
    expected, _ = own_scores(load_causal_lm(str(teacher_path), "float32"), turns)
    assert (rows.hindsight_logprobs - expected).abs().max() < 1e-5


def test_teacher_model_neither_changes_nor_is_saved(model_path, groups, tmp_path):
    learner = learner_of("opd", model_path)
    before = teacher_weights(learner)
    assert float(trained(learner, groups)["teacher"]["kl"]) > 0
    learner.save_to_path(tmp_path)
    assert not [*tmp_path.rglob("teacher")]
    learner.restore_from_path(tmp_path)
    assert torch.equal(teacher_weights(learner), before)


def test_a_teacher_model_excludes_a_stale_one_and_is_required_by_opd(model_path):
    stale = {"teacher_model": model_path, "teacher_sync_iterations": 2}
    misconfigured("teacher_model", learner_of, "serl", model_path, **stale)
    misconfigured("teacher_model", config_of("opd", model_path).validate)


def teacher_weights(learner):
    return parameters_to_vector(learner.policy_module.teacher.parameters())


def test_stale_teacher_survives_a_checkpoint_and_is_renewed_when_due(model_path, groups, tmp_path):
    """A renewal that falls into an iteration without an update follows in the next update."""
    learner, restored = (learner_of("serl", model_path, teacher_sync_iterations=10) for _ in range(2))
    for parameter in learner.get_parameters(learner.policy_module):
        parameter.data += 1e-3  # otherwise the teacher would equal the model's file
    trained(learner, groups)
    learner.save_to_path(tmp_path)
    restored.restore_from_path(tmp_path)
    for iteration, is_renewed in ((2, False), (12, True), (20, False), (22, True)):
        for either in (learner, restored):
            expected = (weights if is_renewed else teacher_weights)(either)
            update(either, groups, iteration)
            assert torch.equal(teacher_weights(either), expected)
        assert torch.equal(weights(restored), weights(learner))


# --- a method of the user


@pytest.fixture
def method_file(tmp_path):
    """Return a function that writes an example of docs/methods.md, or a changed one, as a file."""
    names = []

    def write(name, old="", new=""):
        file = tmp_path / f"{name}_of_this_test.py"
        file.write_text(EXAMPLES[name].replace(old, new))
        names.append(f"trial_ray_method_{file.stem}")
        return str(file)

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_documented_example_trains_and_travels_by_value(method_file, model_path, groups):
    file = method_file("confirmation")
    learner = learner_of(file, model_path)
    assert method_of(learner.config) == file
    assert trained(learner, groups)[learner.method.name]

    config = config_of(file, model_path)
    payload = cloudpickle.dumps(config)
    Path(file).unlink()
    del sys.modules[type(config).__module__]
    elsewhere = cloudpickle.loads(payload)
    elsewhere.validate()
    assert elsewhere.method_class(elsewhere).name == config.method_class.name
    rebuilt = elsewhere.algo_class.get_default_config().update_from_dict(elsewhere.to_dict())
    assert type(rebuilt) is type(elsewhere)
    misconfigured("confirmation", rebuilt.training(confirmation=-1).validate)


def test_own_surrogate_and_mask_are_used(method_file, model_path, groups):
    """On the first minibatch every ratio is 1, so the loss is minus the mean over responses of their advantages."""
    file = method_file("sequence_ratio")
    learner = learner_of(file, model_path, microbatch_rows=256, invalid_action_penalty=0.0, max_tokens_per_forward=60)
    results = update(learner, groups)
    rows = group_turn_rows(groups, learner.config)
    assert float(results["grpo"]["surrogate_loss"]) == pytest.approx(-rows.advantages.mean().item(), abs=1e-6)
    assert float(results["sequence_ratio"]["masked_fraction"]) == pytest.approx(len(rows) / len(rows.turn_ids))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return losses.sum() / (counts > 0).sum().clamp(min=1)", "return losses", r"surrogate .* got shape \[\d"),
        ("return losses.sum() / (counts > 0).sum().clamp(min=1)", "return 0.5", "surrogate .* got float"),
        ("rows.mask.index_fill(0, last, False)", "rows.mask[:-1]", r"rows.mask with shape \[\d+\], got \[\d+\]"),
        ("rows.mask = ", "rows.terms = rows.advantages; rows.mask = ", r"rows.terms with shape \[\d+\], got \[\d+\]"),
    ],
)
def test_a_hook_that_returns_the_wrong_shape_is_refused(old, new, message, method_file, model_path, groups):
    refuses(learner_of(method_file("sequence_ratio", old, new), model_path), groups, MethodError, message)


@pytest.mark.parametrize(("wrong", "hook"), [("surogate", "surrogate"), ("need_action_spans", "needs_action_spans")])
def test_a_misspelt_hook_is_refused(wrong, hook):
    with pytest.raises(MethodError, match=f"'{wrong}'.*'{hook}'"):
        type("Mine", (Method,), {"name": "mine", wrong: True})
    type("Mine", (Method,), {"name": "mine", f"_{wrong}": True, "names": [], "half": True})


def test_microbatches_without_a_token_to_learn_from_are_not_logged(model_path, groups):
    def prepare(rows, *_):
        rows.mask = rows.mask & (rows.turn_ids % 2 == 0)
        return {}

    learner = learner_of("grpo", model_path, microbatch_rows=1, minibatch_rows=1000)
    learner.method.prepare = prepare
    assert float(update(learner, groups)["grpo"]["ratio_mean"]) == pytest.approx(1.0)


def test_a_divergence_without_a_teacher_context_is_refused(model_path, groups, monkeypatch):
    monkeypatch.setattr(Method, "divergence", Divergence(0.5, 1.0))
    refuses(learner_of("grpo", model_path), groups, MethodError, "needs_teacher_context")


def test_settings_are_kept_when_the_method_changes():
    base = config_of("trial", "m", lr=3e-4, hindsight_coeff=0.2)
    base.environment(base.env, env_config={"split": "train"})
    other = with_method(base, "serl")
    assert (other.lr, other.env_config, other.model_path) == (3e-4, {"split": "train"}, "m")
    assert (other.teacher_context, other.ref_kl_coeff) == ("feedback", 0.0)
    assert not hasattr(other, "hindsight_coeff")
    assert [method_of(each) for each in (other, with_method(other, "uniform"))] == ["serl", "uniform"]
    assert with_method(base.training(ref_kl_coeff=0.5), "serl").ref_kl_coeff == 0.5

"""Every method takes real updates on a small model: what moves the weights, what must not change them, what is kept."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ray import cloudpickle
from small_learners import build_learner, config_of, gradients, update, weights, worst
from synthetic_groups import synthetic_groups

from trial_ray.adapters.alfworld import ADAPTER
from trial_ray.algorithms.methods import config_class, method_names, method_of, new_config, with_method
from trial_ray.errors import ConfigError, MethodError
from trial_ray.learner.learner import GRPOLearner
from trial_ray.learner.method import Divergence, Method
from trial_ray.learner.rows import group_turn_rows
from trial_ray.models.tiny import build_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
ACTIVE = {"hindsight_start_iteration": 1, "hindsight_coeff": 0.5, "clamp_alpha": 1e6}
"""Settings with which TRIAL's dense term shows in one update."""


@pytest.fixture(scope="module")
def groups():
    tokenizer = build_tokenizer(ADAPTER.warm_start.vocabulary)
    texts = [f"<think>{thought}</think><action>{action}</action>" for thought in "ab" for action in ("look", "go to x")]
    responses = [np.array([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32) for text in texts]
    return synthetic_groups(vocab_size=400, num_groups=2, group_size=3, most_turns=3, responses=responses, seed=1)


def settings_of(method: str, **training) -> dict:
    shared = {"lr": 1e-2, "ref_kl_coeff": 0.0, "entropy_coeff": 0.0, "weight_decay": 0.0, "microbatch_rows": 4}
    return {**shared, **(ACTIVE if method in ("trial", "uniform", "permuted") else {}), **training}


def learner_of(method: str, model_path: str, **training) -> GRPOLearner:
    config = config_of(method, model_path, **settings_of(method, **training))
    config.validate()
    return build_learner(config)


@pytest.mark.parametrize("method", [*method_names(), "opsd-sampled"])
def test_every_method_trains(method, model_path, groups):
    name, _, divergence = method.partition("-")
    learner = learner_of(name, model_path, **({"divergence": divergence} if divergence else {}))
    before = weights(learner)
    results = update(learner, groups)
    assert float(results["skipped_updates"]) == 0
    logged = {key: float(value) for key, value in results.get(learner.method.name, {}).items()}
    assert all(np.isfinite(value) for value in logged.values()), logged
    assert weights(learner).isfinite().all()
    # On the first minibatch the ratio is 1; sampled OPSD's gap to the policy before the update does the rest.
    assert not torch.equal(before, weights(learner))
    if name == "serl":
        assert 0.05 < logged["action_token_fraction"] < 0.9


def test_the_divergence_is_that_of_the_sampled_policies(model_path, groups):
    """OPSD's temperature divides the logits of the tempered policy once more, so only their product counts."""

    def step(temperature: float, divergence: float) -> dict[str, torch.Tensor]:
        config = config_of("opsd", model_path, **settings_of("opsd", jsd_temperature=divergence, grad_clip=None))
        return gradients(build_learner(config.env_runners(temperature=temperature)), groups)

    once = step(1.0, 0.6)
    assert worst(step(0.5, 1.2), once) < 1e-5
    assert worst(step(1.0, 1.2), once) > 1e-2


# --- the lagged teacher


def teacher_weights(learner: GRPOLearner) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in learner.policy_module.teacher.parameters()]).clone()


def shift_policy(learner: GRPOLearner) -> None:
    with torch.no_grad():
        for parameter in learner.policy_module.lm.parameters():
            parameter.add_(1e-3)


def test_serls_teacher_survives_a_checkpoint(model_path, groups, tmp_path):
    learner = learner_of("serl", model_path)
    shift_policy(learner)  # else the teacher would be the model as it is loaded anyway
    initial = weights(learner)
    update(learner, groups, iteration=1)
    assert torch.equal(teacher_weights(learner), initial)
    assert not torch.equal(weights(learner), initial)
    learner.save_to_path(tmp_path / "checkpoint")
    restored = learner_of("serl", model_path)
    restored.restore_from_path(tmp_path / "checkpoint")
    assert torch.equal(teacher_weights(restored), initial)
    assert torch.equal(weights(restored), weights(learner))
    for each in (learner, restored):
        update(each, groups, iteration=2)
        assert torch.equal(teacher_weights(each), initial)
    assert torch.equal(weights(restored), weights(learner))


def test_a_renewal_that_an_iteration_without_an_update_missed_is_made_up_for(model_path, tmp_path, monkeypatch):
    def renewals(learner: GRPOLearner, *iterations: int) -> list[int]:
        made = []
        monkeypatch.setattr(learner.policy_module, "renew_teacher", lambda: made.append(learner.iteration))
        for iteration in iterations:
            learner.before_gradient_based_update(timesteps={"training_iteration": iteration})
        return made

    def continued() -> GRPOLearner:
        learner.save_to_path(tmp_path / "checkpoint")
        other = learner_of("serl", model_path, teacher_sync_iterations=10)
        other.restore_from_path(tmp_path / "checkpoint")
        return other

    learner = learner_of("serl", model_path, teacher_sync_iterations=10)
    assert renewals(learner, 1, 2, 10, 12, 13, 20) == [1, 12]
    assert renewals(continued(), 22) == [22]


# --- a method of the user's own


EXAMPLES = dict(re.findall(r"```python title=\"(\w+)\.py\"\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def method_file(folder: Path, name: str, source: str) -> Path:
    file = folder / f"{name}_of_this_test.py"
    file.write_text(source)
    return file


@pytest.fixture
def own_method(tmp_path):
    """The first example of docs/methods.md as a file."""
    yield method_file(tmp_path, "my_method", EXAMPLES["confirmation"])
    sys.modules.pop("trial_ray_method_my_method_of_this_test", None)


def own_learner(file: Path, model_path: str, **training) -> GRPOLearner:
    config = with_method(config_of("trial", model_path, **settings_of("grpo", **training)), str(file))
    config.validate()
    return build_learner(config)


def test_the_documented_example_of_an_own_method_trains(own_method, model_path, groups):
    learner = own_learner(own_method, model_path)
    assert method_of(learner.config) == str(own_method)
    before = weights(learner)
    assert update(learner, groups)[learner.method.name]
    assert not torch.equal(before, weights(learner))


def test_an_own_surrogate_and_an_own_mask_are_what_is_trained_with(tmp_path, model_path, groups):
    """On the first minibatch every ratio is 1, so the loss is minus the mean over responses of their advantages."""
    file = method_file(tmp_path, "sequence_ratio", EXAMPLES["sequence_ratio"])
    everything = {"microbatch_rows": 256, "invalid_action_penalty": 0.0}
    learner = own_learner(file, model_path, **everything)
    results = update(learner, groups)
    advantages = group_turn_rows(groups, learner.config).advantages
    assert float(results["grpo"]["surrogate_loss"]) == pytest.approx(-advantages.mean().item(), abs=1e-6)
    responses = [len(turn.response_ids) for group in groups for each in group.survivors for turn in each.turns]
    assert float(results["sequence_ratio"]["masked_fraction"]) == pytest.approx(len(responses) / sum(responses))
    # A mean over responses is no sum of the parts' means: a split for memory must still give the same gradient.
    whole, split = (
        gradients(own_learner(file, model_path, max_tokens_per_forward=tokens, grad_clip=None, **everything), groups)
        for tokens in (100_000, 60)
    )
    assert worst(split, whole) < 1e-6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "return losses.sum() / (counts > 0).sum().clamp(min=1)",
            "return losses",
            r"surrogate must.*shape \[\].*got shape \[\d",
        ),
        ("return losses.sum() / (counts > 0).sum().clamp(min=1)", "return 0.5", r"surrogate must.*got float"),
        ("rows.mask.index_fill(0, last, False)", "rows.mask[:-1]", r"rows.mask with shape \[\d+\], got \[\d+\]"),
    ],
)
def test_a_hook_that_returns_the_wrong_shape_is_refused(old, new, message, tmp_path, model_path, groups):
    assert old in EXAMPLES["sequence_ratio"]
    file = method_file(tmp_path, "wrong_shape", EXAMPLES["sequence_ratio"].replace(old, new))
    learner = own_learner(file, model_path)
    before = weights(learner)
    with pytest.raises(MethodError, match=message):
        update(learner, groups)
    assert torch.equal(before, weights(learner))
    sys.modules.pop("trial_ray_method_wrong_shape_of_this_test", None)


@pytest.mark.parametrize(("wrong", "hook"), [("surogate", "surrogate"), ("need_action_spans", "needs_action_spans")])
def test_a_misspelt_hook_is_refused(wrong, hook):
    with pytest.raises(MethodError, match=f"Mine defines '{wrong}', which is not a hook.*Did you mean '{hook}'"):
        type("Mine", (Method,), {"name": "mine", wrong: True})
    type("Mine", (Method,), {"name": "mine", f"_{wrong}": True, "names": [], "half": True})


def test_an_own_method_travels_by_value_to_where_its_file_is_not(own_method, model_path):
    config = config_class(str(own_method))().environment("trial/ALFWorld-v0").rl_module(model_path=model_path)
    payload = cloudpickle.dumps(config)
    own_method.unlink()
    del sys.modules[type(config).__module__]
    elsewhere = cloudpickle.loads(payload)
    elsewhere.validate()
    assert elsewhere.method_class(elsewhere).name == config.method_class.name
    rebuilt = elsewhere.algo_class.get_default_config().update_from_dict(elsewhere.to_dict())
    assert type(rebuilt) is type(elsewhere)
    rebuilt.training(confirmation=0.5).validate()
    with pytest.raises(ConfigError, match="confirmation is -1, expected a float of at least 0"):
        rebuilt.training(confirmation=-1).validate()
    assert "confirmation: μ in the first iteration." in type(rebuilt).training.__doc__


def test_settings_change_hands_between_methods():
    base = new_config("trial").environment("trial/ALFWorld-v0", env_config={"split": "train"}).rl_module(model_path="m")
    base.training(lr=3e-4, hindsight_coeff=0.2, group_size=5)
    other = with_method(base, "serl")
    assert (other.lr, other.group_size, other.env_config, other.model_path) == (3e-4, 5, {"split": "train"}, "m")
    assert (other.teacher_context, other.ref_kl_coeff, other.teacher_sync_iterations) == ("feedback", 0.0, 10)
    assert not hasattr(other, "hindsight_coeff")
    assert method_of(other) == "serl"
    assert method_of(with_method(other, "uniform")) == "uniform"
    assert with_method(base.training(ref_kl_coeff=0.5), "serl").ref_kl_coeff == 0.5


def test_an_own_ratio_is_that_of_the_loss(model_path, groups):
    """Of the same mean over tokens; a step from a ratio of 0 has no gradient."""

    class Own(Method):
        name = "own"

        def log_ratios(self, tokens, logprobs):
            return 0.0 * logprobs

    learner = learner_of("grpo", model_path)
    learner.method = learner.passes._method = Own(learner.config)
    before = weights(learner)
    update(learner, groups)
    assert torch.equal(before, weights(learner))


def test_microbatches_without_a_token_to_learn_from_measure_nothing(model_path, groups):
    class Sparing(Method):
        name = "sparing"

        def prepare(self, rows, groups, iteration):
            rows.mask = rows.mask & (rows.turn_ids % 2 == 0)
            return {}

    learner = learner_of("grpo", model_path, microbatch_rows=1, minibatch_rows=1000)
    learner.method = learner.passes._method = learner.scoring._method = Sparing(learner.config)
    assert float(update(learner, groups)["grpo"]["ratio_mean"]) == pytest.approx(1.0)


def test_a_divergence_without_a_teacher_context_is_refused(model_path, groups):
    learner = learner_of("grpo", model_path)
    learner.scoring._method = type("Own", (Method,), {"name": "own", "divergence": Divergence(0.5, 1.0)})(
        learner.config
    )
    with pytest.raises(MethodError, match="needs a teacher context"):
        update(learner, groups)

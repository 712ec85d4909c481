"""The gradient of a whole optimizer step against a plain float64 loop over the rows, one forward pass a row and view.

The loop shares no code with the package: prompts are put together here, log-probabilities come from the model's own logits, and
advantages, weights and losses from ``method_reference``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import method_reference as ref
import numpy as np
import pytest
import torch
from architectures import VOCABULARY, random_model
from small_learners import build_learner, config_of, gradients, refuses, update, worst
from synthetic_groups import synthetic_groups

from trial_ray.algorithms.methods import new_config
from trial_ray.errors import WeightSyncError
from trial_ray.learner.loss import WeightedMeans
from trial_ray.learner.passes import MicrobatchPasses
from trial_ray.learner.rows import group_turn_rows
from trial_ray.learner.update_plan import Microbatch

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
MICROBATCH_ROWS = 7
TRAINING = {
    "minibatch_rows": 1000,
    "microbatch_rows": MICROBATCH_ROWS,
    "batch_shards": 1,
    "ref_kl_coeff": 0.0,
    "entropy_coeff": 0.001,
    "reward_scale": 10.0,
    "grad_clip": None,
    "lr": 1e-3,
    "model_dtype": "float64",
    "mask_truncated": True,
}
VERSION = 7
ACTIVE = {"hindsight_coeff": 1.5, "clamp_alpha": 1.0, "hindsight_start_iteration": 1}


@pytest.fixture(scope="module")
def model_path(exact_model_path):
    return exact_model_path


def new_groups(num_groups: int = 3):
    return synthetic_groups(num_groups=num_groups, max_turns=5, seed=5)


def turns_of(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@pytest.fixture
def groups():
    """Some responses are truncated, so that nothing is learned from them; the engine's log-probabilities are others.

    Turns of a rollout are sampled at two temperatures.
    """
    groups, rng = new_groups(), np.random.default_rng(5)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        trajectory.turns = [
            dataclasses.replace(
                turn,
                logprobs=rng.uniform(-9, -3, len(turn.logprobs)).astype(np.float32),
                finish_reason="length" if rng.random() < 0.2 else "stop",
                temperature=(0.7, 1.2)[index % 2],
            )
            for index, turn in enumerate(trajectory.turns)
        ]
    return groups


def exact_learner(method: str, model_path: str, **settings):
    return build_learner(config_of(method, model_path, **{**TRAINING, **settings}))


# --- the loop


def log_likelihoods(lm, prompt, response, temperature):
    logits = lm(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)], -(logprobs.exp() * logprobs).sum(-1)


def hindsight_prompt(turn, trajectory, tokenizer):
    text = turn.outcome
    if turn is trajectory.turns[-1] and trajectory.ended == "terminated":
        text += f"\nThe episode ended: the task {'succeeded' if trajectory.success else 'failed'}."
    evidence = tokenizer.encode(EVIDENCE_LEAD + text, add_special_tokens=False)
    return [*turn.prompt_ids[: turn.insert_at], *evidence, *turn.prompt_ids[turn.insert_at :]]


def importance(tokens, reported, cap, mode):
    logs = [token.old - engine for token, engine in zip(tokens, reported, strict=True)]
    ratios = [math.exp(math.fsum(logs))] * len(logs) if mode.startswith("sequence") else map(math.exp, logs)
    return [ratio if ratio <= cap else cap * mode.endswith("truncate") for ratio in ratios]


def records(lm, tokenizer, groups, cap, mode):
    turns = []
    rollouts = ((number, trajectory) for number, group in enumerate(groups) for trajectory in group.trajectories)
    for index, (group, trajectory) in enumerate(rollouts):
        for turn in trajectory.turns:
            response = turn.response_ids.tolist()
            logp, entropy = log_likelihoods(lm, turn.prompt_ids.tolist(), response, turn.temperature)
            with torch.no_grad():
                prompt = hindsight_prompt(turn, trajectory, tokenizer)
                teacher, _ = log_likelihoods(lm, prompt, response, turn.temperature)
            tokens = [
                ref.Token(p.item(), t.item(), 0.0, False, p, e) for p, t, e in zip(logp, teacher, entropy, strict=True)
            ]
            if cap is not None:
                reported = turn.logprobs.tolist()
                for token, weight in zip(tokens, importance(tokens, reported, cap, mode), strict=True):
                    token.importance = weight
            last = turn is trajectory.turns[-1]
            turns.append(ref.TurnRecord(group, index, turn.observation, turn.valid, trajectory.success, last, tokens))
            turns[-1].truncated = turn.finish_reason == "length"
    for turn, advantage in zip(turns, ref.row_advantages(turns), strict=True):
        turn.advantage = advantage
    eligible = [turn for turn in turns if not turn.truncated]
    for turn, weight in zip(eligible, ref.relative_weights(eligible), strict=True):
        turn.weight = weight
    return turns, len(eligible)


def loop_gradients(learner, groups, coefficient=None, cap=None, mode="token_truncate", **settings):
    """Return the gradients by the parameters' names, and whether the clamp was saturated in some microbatches."""
    lm = learner.policy_module.lm
    lm.zero_grad()
    turns, num_eligible = records(lm, learner.policy_module.tokenizer, groups, cap, mode)
    pieces = np.array_split(np.arange(len(turns)), -(-len(turns) // MICROBATCH_ROWS))
    saturated = set()
    for piece in pieces:
        rows = [turns[row] for row in piece if not turns[row].truncated]
        if coefficient is None:
            loss = ref.grpo(rows, kl=0.0, **settings)
        else:
            loss, clamped = ref.trial(rows, coefficient, kl=0.0)
            saturated.add(clamped)
        (len(rows) / num_eligible * loss).backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}, saturated


@pytest.mark.parametrize(
    ("method", "own", "of_loop"),
    [
        ("grpo", {"ratio_level": "sequence", "surrogate_mean": "rows"}, {"level": "sequence", "how": "rows"}),
        ("grpo", {"surrogate_mean": "fixed_length"}, {"how": "fixed_length"}),
        ("trial", ACTIVE, {"coefficient": 1.5}),
        *[
            ("grpo", {"importance_cap": 1.2, "importance_mode": mode}, {"cap": 1.2, "mode": mode})
            for mode in ("token_truncate", "sequence_mask")
        ],
    ],
)
def test_step_has_the_gradient_of_the_loop(method, own, of_loop, model_path, groups):
    """Passes of any size give the same gradient."""
    learner = exact_learner(method, model_path, **own)
    expected, saturated = loop_gradients(learner, groups, **of_loop)
    learner.policy_module.lm.zero_grad()
    assert worst(gradients(learner, groups), expected) < 1e-12
    split = exact_learner(method, model_path, max_tokens_per_forward=60, **own)
    assert worst(gradients(split, groups), expected) < 1e-12
    assert method == "grpo" or saturated == {False, True}


# --- passes that are not needed


def test_a_split_is_forwarded_twice_only_if_the_clamp_acts(model_path, groups):
    def forwarded(method, iteration=30, **training) -> int:
        learner = exact_learner(method, model_path, max_tokens_per_forward=60, **training)
        return int(update(learner, groups, iteration)["update"]["tokens_forwarded"])

    plain = forwarded("grpo")
    assert forwarded("trial", 1, hindsight_coeff=0.3, hindsight_start_iteration=2) == plain
    assert forwarded("trial", **{**ACTIVE, "clamp_alpha": math.inf}) == forwarded("sdar") == plain
    assert forwarded("trial", **ACTIVE) == 2 * plain


@pytest.mark.parametrize(("method", "own"), [("grpo", {}), ("trial", {**ACTIVE, "clamp_alpha": 1e-9})])
def test_rollouts_without_a_gradient_get_no_backward_pass(method, own, model_path, monkeypatch):
    """Two of three groups have equal rewards, and TRIAL's saturated clamp removes the gradient of their dense term."""
    groups, passes, backward = new_groups(), [], torch.autograd.backward
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.success |= number < 2
        for turn in turns_of([group]):
            turn.prompt_ids[0] = 10 + number  # prompts of a group share a prefix, so its rows are computed together
    monkeypatch.setattr(torch.autograd, "backward", lambda *given: passes.append(1) or backward(*given))

    def step(groups, tokens=60, **changed):
        passes.clear()
        own_terms = {"entropy_coeff": 0.0, "invalid_action_penalty": 0.0, "microbatch_rows": 1000, **own, **changed}
        learner = exact_learner(method, model_path, **own_terms, max_tokens_per_forward=tokens)
        return gradients(learner, groups), len(passes)

    result, needed = step(groups)
    assert worst(result, step(groups, 100_000)[0]) < 1e-12
    assert step(groups, entropy_coeff=0.001)[1] > 2 * needed  # with an entropy term all rows have a gradient
    zeros, last = step(groups[:2])
    assert (last, any(bool(gradient.any()) for gradient in zeros.values())) == (1, False)


class Watched:
    """A module that computes nothing and records the number of inputs of each pass with a gradient."""

    teacher = sharded = None

    def __init__(self, lm):
        self.lm = lm
        self.num_inputs = []

    def forward_train(self, batch):
        packed = batch["sequences"]
        if torch.is_grad_enabled():
            self.num_inputs.append(sum(pack.input_ids.numel() for pack in packed.packs))
        outputs = torch.zeros(2, len(packed.tokens), requires_grad=True)
        return {"logprobs": outputs[0], "entropy": outputs[1]}


@pytest.mark.parametrize("name", ["llama", "mistral"])  # in trees, padded
@pytest.mark.parametrize("method", ["grpo", "trial"])
def test_no_pass_has_more_inputs_than_allowed(name, method):
    limit = 300
    config = new_config(method).training(max_tokens_per_forward=limit)
    rows = group_turn_rows(synthetic_groups(VOCABULARY, num_groups=40, seed=1), config)
    rows.logprobs = rows.hindsight_logprobs = torch.zeros(int(rows.lengths.sum()))
    rows.weights = torch.ones(len(rows))
    lengths = [turn.num_tokens for turn in rows.turns]
    assert max(lengths) < limit < sum(lengths)
    module = Watched(random_model(name))
    passes = MicrobatchPasses(module, config.method_class(config), config, WeightedMeans())
    pieces = np.array_split(np.arange(len(rows)), 3)
    passes.backward(rows, [Microbatch(piece, 0, len(piece) / len(rows)) for piece in pieces], 1)
    assert max(module.num_inputs) <= limit


# --- other precision


def test_gradients_in_bfloat16_are_close_and_the_reference_is_the_policy(model_path, groups):
    shared = {"ref_kl_coeff": 0.01, "model_dtype": "float32"}
    expected = gradients(exact_learner("grpo", model_path, **shared), groups)
    half, saving = (
        exact_learner("grpo", model_path, **{**shared, **own})
        for own in ({"model_dtype": "bfloat16"}, {"compute_dtype": "bfloat16", "gradient_checkpointing": True})
    )
    for learner in (half, saving):
        found = {name: value.float() for name, value in gradients(learner, groups).items()}
        assert worst(found, expected) < 0.1
    reference, policy = saving.policy_module.reference, saving.policy_module.lm
    assert policy.is_gradient_checkpointing
    assert saving.get_optimizer("default_policy").param_groups[0]["fused"]
    linear = [module for module in reference.get_decoder().modules() if isinstance(module, torch.nn.Linear)]
    assert {module.weight.dtype for module in linear} == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    with torch.no_grad(), saving.policy_module.autocast():
        ids = torch.arange(20, 60)[None]
        assert torch.equal(reference(input_ids=ids).logits, policy(input_ids=ids).logits)


# --- what must not be trained on


def sampled_by(groups, *versions):
    """Return the groups with turns sampled by these versions of the weights, in turns."""
    number = itertools.cycle(versions)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.turns = [dataclasses.replace(turn, weight_version=next(number)) for turn in trajectory.turns]
    return groups


@pytest.mark.parametrize(
    ("versions", "reported", "max_diff"),
    [
        ((VERSION,), -5.0, None),
        ((VERSION,), math.nan, None),
        ((VERSION - 1, VERSION), -5.0, None),
        ((VERSION - 1,), math.nan, 100.0),
    ],
)
def test_responses_of_another_policy_are_not_trained_on(versions, reported, max_diff, model_path):
    groups = sampled_by(new_groups(1), *versions)
    for turn in turns_of(groups):
        turn.logprobs[:] = reported
    learner = exact_learner("grpo", model_path, max_logprob_diff=max_diff, importance_cap=1.5)
    refuses(learner, groups, WeightSyncError, f"at most {max_diff or 0.001:g}", weight_version=VERSION)


def test_older_rows_may_differ_and_their_age_is_logged(model_path, groups):
    learner = exact_learner("grpo", model_path, max_logprob_diff=None, importance_cap=1.5)
    results = update(learner, sampled_by(groups, VERSION - 1, VERSION - 2), weight_version=VERSION)
    engine, rows = ({name: float(value) for name, value in results[key].items()} for key in ("engine", "rows"))
    assert engine["logprob_diff"] == 0
    assert (rows["staleness_max"], rows["staleness_mean"]) == (2, pytest.approx(1.5, abs=0.1))
    assert 0 < engine["effective_sample_size"] < 1 < engine["ratio_max"]

"""The gradient of a whole optimizer step against a plain float64 loop over the rows, one forward pass a row and view.

The loop shares no code with the product: prompts are put together here, log-probabilities come from the model's own logits,
and advantages, weights and losses from ``method_reference``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import method_reference as ref
import numpy as np
import pytest
import torch
from small_learners import build_learner, config_of, gradients, learner_of, update, worst
from synthetic_groups import synthetic_groups

from trial_ray.algorithms.methods.rlsd import RescaledAdvantages
from trial_ray.errors import WeightSyncError
from trial_ray.learner.method import Method
from trial_ray.objectives.choices import IMPORTANCE_MODES
from trial_ray.objectives.losses import weighted_likelihood_loss

EVIDENCE_LEAD = "\n\nOutcome after the reply:\n"
TRAINING = {
    "minibatch_rows": 1000,
    "microbatch_rows": 7,
    "batch_shards": 1,
    "ref_kl_coeff": 0.0,
    "entropy_coeff": 0.001,
    "reward_scale": 10.0,
    "grad_clip": None,
    "lr": 1e-3,
}
VERSION = 7
ACTIVE = {"hindsight_coeff": 1.5, "clamp_alpha": 1.0, "hindsight_start_iteration": 1}


@pytest.fixture(scope="module")
def model_path(exact_model_path):
    return exact_model_path


@pytest.fixture(scope="module")
def groups():
    groups = synthetic_groups(vocab_size=400, num_groups=3, group_size=4, most_turns=5, seed=5)
    rng = np.random.default_rng(5)
    for turn in turns_of(groups):
        turn.logprobs[:] = rng.uniform(-9, -3, len(turn.logprobs))
    return groups


@pytest.fixture(scope="module")
def kl_gradients(model_path, groups):
    """Makes the gradients of the KL term alone, whose coefficient makes them small: they may not become 0."""
    tied = [
        dataclasses.replace(
            group, trajectories=[dataclasses.replace(each, success=False) for each in group.trajectories]
        )
        for group in groups
    ]

    @functools.cache
    def of(model_dtype: str, compute_dtype: str | None) -> torch.Tensor:
        settings = TRAINING | {"ref_kl_coeff": 1e-4, "entropy_coeff": 0.0, "invalid_action_penalty": 0.0}
        learner = learner_of("grpo", model_path, **settings, model_dtype=model_dtype, compute_dtype=compute_dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for each in learner.policy_module.policy_parameters():
                each.add_(torch.randn(each.shape, generator=generator).to(each.dtype) * 0.2 * each.abs().mean())
        return torch.cat([each.double().reshape(-1) for _, each in sorted(gradients(learner, tied).items())])

    return of


@pytest.mark.parametrize(
    ("model_dtype", "compute_dtype", "limit"),
    [("float32", None, 1e-4), ("float32", "bfloat16", 0.1), ("bfloat16", None, 0.1)],
)
def test_small_gradients_of_every_dtype_are_those_of_float64(kl_gradients, model_dtype, compute_dtype, limit):
    exact, found = kl_gradients("float64", None), kl_gradients(model_dtype, compute_dtype)
    assert (found - exact).norm() < limit * exact.norm()
    assert (found != 0).sum() > 0.99 * (exact != 0).sum()


def turns_of(groups):
    return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


def sampled_by(groups, *versions):
    """The same groups, whose turns these versions of the weights sampled by turns."""
    number = itertools.cycle(versions)
    again = lambda trajectory: [dataclasses.replace(each, weight_version=next(number)) for each in trajectory.turns]  # noqa: E731
    return [
        dataclasses.replace(group, trajectories=[dataclasses.replace(e, turns=again(e)) for e in group.trajectories])
        for group in groups
    ]


def exact_learner(method: str, model_path: str, **settings):
    return learner_of(method, model_path, **{**TRAINING, "model_dtype": "float64", **settings})


# --- the loop


def log_likelihoods(lm, prompt, response, temperature):
    ids = torch.tensor([[*prompt, *response]])
    logits = lm(ids).logits[0, len(prompt) - 1 : -1] / temperature
    logprobs = torch.log_softmax(logits, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(response)), torch.tensor(response)], entropy


def hindsight_prompt(turn, trajectory, tokenizer):
    text = turn.outcome
    if turn is trajectory.turns[-1] and trajectory.ended == "terminated":
        text += f"\nThe episode ended: the task {'succeeded' if trajectory.success else 'failed'}."
    evidence = tokenizer.encode(EVIDENCE_LEAD + text, add_special_tokens=False)
    return [*turn.prompt_ids[: turn.insert_at], *evidence, *turn.prompt_ids[turn.insert_at :]]


def weights_of(tokens, reported, cap, mode):
    if cap is None:
        return [1.0] * len(tokens)
    logs = [token.old - engine for token, engine in zip(tokens, reported, strict=True)]
    ratios = [math.exp(math.fsum(logs))] * len(logs) if mode.startswith("sequence") else [math.exp(log) for log in logs]
    return [ratio if ratio <= cap else cap * mode.endswith("truncate") for ratio in ratios]


def records(lm, tokenizer, groups, temperature, cap, mode):
    trajectory_number, turns = 0, []
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                response = turn.response_ids.tolist()
                logp, entropy = log_likelihoods(lm, turn.prompt_ids.tolist(), response, temperature)
                with torch.no_grad():
                    teacher, _ = log_likelihoods(
                        lm, hindsight_prompt(turn, trajectory, tokenizer), response, temperature
                    )
                tokens = [
                    ref.Token(old=p.item(), teacher=t.item(), frozen=0.0, in_action=False, logp=p, entropy=e)
                    for p, t, e in zip(logp, teacher, entropy, strict=True)
                ]
                for token, weight in zip(tokens, weights_of(tokens, turn.logprobs.tolist(), cap, mode), strict=True):
                    token.importance = weight
                last = turn is trajectory.turns[-1]
                turns.append(
                    ref.TurnRecord(
                        number, trajectory_number, turn.observation, turn.valid, trajectory.success, last, tokens
                    )
                )
            trajectory_number += 1
    for turn, advantage in zip(turns, ref.row_advantages(turns, "trajectories"), strict=True):
        turn.advantage = advantage
    for turn, weight in zip(turns, ref.relative_weights(turns), strict=True):
        turn.weight = weight
    return turns


def loop_gradients(learner, groups, temperature=1.0, coefficient=None, cap=None, mode="token_truncate"):
    lm = learner.policy_module.lm
    lm.zero_grad()
    turns = records(lm, learner.policy_module.tokenizer, groups, temperature, cap, mode)
    pieces = -(-len(turns) // TRAINING["microbatch_rows"])
    # As even as whole rows allow, the longer ones first.
    sizes = [len(turns) // pieces + (piece < len(turns) % pieces) for piece in range(pieces)]
    assert len(set(sizes)) > 1, "the tail must be shorter, or its weight is not tested"
    saturated, total, start = set(), 0.0, 0
    for size in sizes:
        rows = turns[start : start + size]
        if coefficient is None:
            loss = ref.grpo(rows, kl=0.0)
        else:
            loss, clamped = ref.trial(rows, coefficient, kl=0.0)
            saturated.add(clamped)
        total = total + size / len(turns) * loss
        start += size
    total.backward()
    found = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    lm.zero_grad()
    return found, saturated


@pytest.mark.parametrize(
    ("method", "own", "of_loop"),
    [("grpo", {}, {}), ("grpo", {"importance_cap": 1.5}, {"cap": 1.5}), ("trial", ACTIVE, {"coefficient": 1.5})],
)
def test_a_whole_step_has_the_gradient_of_the_loop(method, own, of_loop, model_path, groups):
    config = config_of(method, model_path, model_dtype="float64", **TRAINING, **own)
    learner = build_learner(config.env_runners(temperature=0.7))
    expected, saturated = loop_gradients(learner, groups, 0.7, **of_loop)
    assert worst(gradients(learner, groups), expected) < 1e-12
    assert method == "grpo" or saturated == {False, True}
    other = loop_gradients(learner, groups, 1.0, **of_loop)[0]
    assert worst(expected, other) > 1e-3, "the temperature must make a difference, or it is not tested"


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_importance_weights_of_every_mode_do_not_depend_on_cuts(mode, model_path, groups):
    learner = exact_learner("grpo", model_path, importance_cap=1.2, importance_mode=mode, max_tokens_per_forward=60)
    expected, _ = loop_gradients(learner, groups, cap=1.2, mode=mode)
    assert worst(gradients(learner, groups), expected) < 1e-12


# --- what must not change the gradient


@pytest.mark.parametrize("budget", [60, 1])
@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("trial", ACTIVE),
        ("grpo", {"ratio_level": "sequence", "surrogate_mean": "rows"}),
        ("grpo", {"surrogate_mean": "fixed_length"}),
    ],
)
def test_no_memory_split_changes_the_gradient(method, own, budget, model_path, groups):
    whole, split = (
        gradients(exact_learner(method, model_path, max_tokens_per_forward=tokens, **own), groups)
        for tokens in (100_000, budget)
    )
    assert worst(split, whole) < 1e-12


class WhitenedAdvantages(Method):
    def token_advantages(self, tokens, logprobs, iteration):
        return whitened(tokens.advantages + logprobs)


class WhitenedRescaling(RescaledAdvantages):
    """A method that is declared per token, with an own hook that is not."""

    def token_advantages(self, tokens, logprobs, iteration):
        return whitened(super().token_advantages(tokens, logprobs, iteration) + logprobs)


class WhitenedGaps(Method):
    def dense_loss(self, tokens, fwd_out, iteration):
        gaps = whitened(tokens.hindsight_logprobs - fwd_out["logprobs"].detach())
        return weighted_likelihood_loss(fwd_out["logprobs"], gaps, tokens.mask), {}


def whitened(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / values.std()


@pytest.mark.parametrize("method", [WhitenedAdvantages, WhitenedRescaling, WhitenedGaps])
def test_a_hook_over_the_whole_microbatch_sees_it_however_it_is_split(method, model_path, groups):
    def step(max_tokens: int) -> dict[str, torch.Tensor]:
        learner = exact_learner("rlsd", model_path, max_tokens_per_forward=max_tokens)
        learner.method = learner.passes._method = learner.scoring._method = method(learner.config)
        return gradients(learner, groups)

    whole = step(100_000)
    assert max(worst(step(tokens), whole) for tokens in (60, 1)) < 1e-12


def test_a_split_is_forwarded_twice_only_where_the_clamp_acts(model_path, groups, monkeypatch):
    def forwards(method, iteration=30, **training) -> int:
        learner = exact_learner(method, model_path, max_tokens_per_forward=60, **training)
        calls = []
        forward = learner.policy_module.forward_train
        monkeypatch.setattr(learner.policy_module, "forward_train", lambda batch: calls.append(1) or forward(batch))
        gradients(learner, groups, iteration)
        return len(calls)

    plain = forwards("grpo")
    assert forwards("trial", 1, hindsight_coeff=0.3, hindsight_start_iteration=2) == plain
    assert forwards("trial", **{**ACTIVE, "clamp_alpha": math.inf}) == plain
    assert forwards("sdar") == forwards("rlsd") == plain
    assert forwards("trial", **ACTIVE) == 2 * plain


@pytest.mark.parametrize(("method", "own"), [("grpo", {}), ("trial", {**ACTIVE, "clamp_alpha": 1e-9})])
def test_rollouts_without_a_gradient_are_not_carried_through_the_model(method, own, model_path, monkeypatch):
    """Two of three groups earn the same; TRIAL's clamp, which is saturated, leaves their hindsight no gradient."""
    groups = synthetic_groups(vocab_size=400, num_groups=3, group_size=4, most_turns=5, seed=5)
    for trajectory in (each for group in groups[:2] for each in group.trajectories):
        trajectory.success = True
    for number, group in enumerate(groups):
        for turn in turns_of([group]):
            turn.prompt_ids[0] = 10 + number  # prompts of one task begin alike, so that its rows are computed together
    own = {**own, "entropy_coeff": 0.0, "invalid_action_penalty": 0.0, "microbatch_rows": 1000}
    whole = gradients(exact_learner(method, model_path, **own), groups)
    passes, backward = [], torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *given: passes.append(1) or backward(*given))

    def split(groups, **changed):
        passes.clear()
        found = gradients(exact_learner(method, model_path, **{**own, **changed}, max_tokens_per_forward=60), groups)
        return found, len(passes)

    found, needed = split(groups)
    assert worst(found, whole) < 1e-12
    assert split(groups, entropy_coeff=0.001)[1] > 2 * needed, "with an entropy term all rows have a gradient"
    nothing, last = split(groups[:2])
    assert (last, any(bool(gradient.any()) for gradient in nothing.values())) == (1, False)


# --- what must not be trained on


@pytest.mark.parametrize("reported", [-5.0, math.nan, -math.inf])
def test_responses_of_another_policy_are_not_trained_on(reported, model_path):
    groups = synthetic_groups(vocab_size=400, num_groups=1)
    for turn in turns_of(groups):
        turn.logprobs[:] = reported
    learner = exact_learner("grpo", model_path, max_logprob_diff=None)
    before = [parameter.clone() for parameter in learner.policy_module.lm.parameters()]
    with pytest.raises(WeightSyncError, match=r"disagree by .* nats per token.*expected at most 0\.001"):
        update(learner, groups)
    assert all(torch.equal(*pair) for pair in zip(before, learner.policy_module.lm.parameters(), strict=True))


def test_older_rows_may_differ_and_their_age_is_logged(model_path, groups):
    learner = exact_learner("grpo", model_path, max_logprob_diff=None, importance_cap=1.5)
    results = update(learner, sampled_by(groups, VERSION - 1, VERSION - 2), weight_version=VERSION)
    engine, rows = ({name: float(value) for name, value in results[key].items()} for key in ("engine", "rows"))
    assert engine["logprob_diff"] == 0
    assert (rows["staleness_max"], rows["staleness_mean"]) == (2, pytest.approx(1.5, abs=0.1))
    assert 0 < engine["effective_sample_size"] < 1 < engine["ratio_max"]


@pytest.mark.parametrize(
    ("versions", "reported", "message"),
    [
        ((VERSION - 1, VERSION), None, "disagree by .* nats per token"),
        ((VERSION - 1,), math.nan, "disagree by nan nats"),
    ],
)
def test_beside_older_rows_current_ones_must_agree_and_all_be_numbers(versions, reported, message, model_path):
    groups = sampled_by(synthetic_groups(vocab_size=400, num_groups=1), *versions)
    for turn in turns_of(groups):
        turn.logprobs[:] = -5.0 if reported is None else reported
    learner = exact_learner(
        "grpo", model_path, max_logprob_diff=None if reported is None else 100.0, importance_cap=1.5
    )
    with pytest.raises(WeightSyncError, match=message):
        update(learner, groups, weight_version=VERSION)

"""Rows that older weights sampled: weights of the tokens, effective sample size, and what still stops an update."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from small_learners import build_learner
from synthetic_groups import synthetic_groups

from trial_ray.algorithms import GRPOConfig
from trial_ray.errors import WeightSyncError
from trial_ray.learner.loss import loss_terms
from trial_ray.learner.rows import TokenBatch
from trial_ray.objectives.losses import effective_sample_size, truncated_importance_weights

VERSION = 7
CAP = 1.5


def groups_of(behaviour=lambda rng: rng.uniform(-9, -3), versions=(VERSION,), seed=5):
    """Groups whose responses an engine is said to have sampled, by the versions in turn, with these log-probabilities."""
    groups, rng, number = (
        synthetic_groups(vocab_size=400, num_groups=2, most_turns=5, seed=seed),
        np.random.default_rng(seed),
        0,
    )
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        for index, turn in enumerate(trajectory.turns):
            changed = np.array([behaviour(rng) for _ in turn.logprobs], np.float32)
            trajectory.turns[index] = type(turn)(
                **{name: getattr(turn, name) for name in turn.__slots__}
                | {"logprobs": changed, "weight_version": versions[number % len(versions)]}
            )
            number += 1
    return groups


def learner_of(model_path: str, **training):
    shared = {"kl_coeff": 0.0, "entropy_coeff": 0.0, "invalid_action_penalty": 0.0, "minibatch_rows": 1000}
    shared |= {"microbatch_rows": 7, "batch_shards": 1, "grad_clip": None, "max_logprob_gap": 100.0}
    config = GRPOConfig().environment("trial/ALFWorld-v0").rl_module(model_path=model_path, model_dtype="float64")
    return build_learner(config.training(**{**shared, **training}))


def update(learner, groups):
    timesteps = {"training_iteration": 1, "weight_version": VERSION}
    return learner.update(episodes=list(groups), timesteps=timesteps)["default_policy"]


def test_truncated_weights_and_effective_sample_size_equal_their_formulas():
    learner, engine = [-1.0, -2.0, -0.5, -3.0], [-1.0, -3.5, -2.5, -0.1]
    ratios = [math.exp(new - old) for new, old in zip(learner, engine, strict=True)]
    flat = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (learner, engine)]
    weights = truncated_importance_weights(*flat, 2.0)
    assert weights.tolist() == pytest.approx([min(ratio, 2.0) for ratio in ratios])
    assert not weights.requires_grad
    expected = sum(ratios) ** 2 / (4 * sum(ratio**2 for ratio in ratios))
    assert effective_sample_size(*flat).item() == pytest.approx(expected)
    equal = torch.full((5,), -1.0)
    assert effective_sample_size(equal, equal - 300.0).item() == pytest.approx(1.0), (
        "no ratio is too large for its square"
    )
    one = effective_sample_size(torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([-500.0, 0.0, 0.0, 0.0]))
    assert one.item() == pytest.approx(0.25)
    with pytest.raises(ValueError, match="cap must be at least 1"):
        truncated_importance_weights(*flat, 0.5)


@pytest.mark.parametrize("cap", [None, CAP])
def test_a_whole_step_has_the_gradient_of_the_weighted_policy_gradient(cap, model_path):
    """One forward pass a row in float64; at the old weights the clipped ratio is 1, so the gradient is -w A ∇ log π."""
    groups = groups_of()
    learner = learner_of(model_path, importance_cap=cap, max_tokens_per_forward=60)
    lm = learner.policy_module.lm
    rows, raw = [], []
    for group in groups:
        returns = [10.0 * trajectory.success for trajectory in group.trajectories]
        deviation = statistics.stdev(returns)
        for trajectory, earned in zip(group.trajectories, returns, strict=True):
            advantage = (earned - statistics.mean(returns)) / (deviation + 1e-6) if deviation else 0.0
            for turn in trajectory.turns:
                ids = torch.tensor([[*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]])
                logits = lm(ids).logits[0, len(turn.prompt_ids) - 1 : -1]
                logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, len(turn.prompt_ids) :, None])[:, 0]
                ratio = (logprobs.detach() - torch.from_numpy(turn.logprobs).double()).exp()
                raw += ratio.tolist()
                weight = torch.ones_like(ratio) if cap is None else torch.minimum(ratio, torch.tensor(cap))
                rows.append(-(weight * advantage * logprobs))
    pieces = -(-len(rows) // 7)
    cuts = np.cumsum([0] + [len(rows) // pieces + (piece < len(rows) % pieces) for piece in range(pieces)])
    parts = [torch.cat(rows[start:end]).mean() * (end - start) / len(rows) for start, end in itertools.pairwise(cuts)]
    expected = torch.autograd.grad(sum(parts), list(lm.parameters()), allow_unused=True)
    found = []
    learner.apply_gradients = lambda gradients: found.extend(gradients[ref] for ref in learner._params)
    results = update(learner, groups)
    scale = max(each.abs().max() for each in expected if each is not None)
    for one, other in zip(found, [each for each in expected if each is not None], strict=True):
        assert (one - other).abs().max() < 1e-12 * scale
    assert min(raw) < 1 < CAP < max(raw), "weights on both sides of the cap, or it is not tested"
    size = float(results["engine"]["effective_sample_size"])
    assert size == pytest.approx(sum(raw) ** 2 / (len(raw) * sum(each**2 for each in raw)))
    assert float(results["engine"]["ratio_mean"]) == pytest.approx(statistics.mean(raw))
    assert float(results["engine"]["ratio_max"]) == pytest.approx(max(raw))


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_each_tokens_clipped_surrogate_is_weighted_and_nothing_else(dual_clip):
    rng = np.random.default_rng(0)
    config = GRPOConfig().training(dual_clip=dual_clip, entropy_coeff=0.5, importance_cap=2.0)
    draw = lambda low, high: torch.from_numpy(rng.uniform(low, high, 64))  # noqa: E731
    old, advantages, weights, entropy = draw(-3, -1), draw(-2, 2), draw(0, 2), draw(0, 1)
    logprobs = (old + draw(-1.5, 1.5)).requires_grad_()
    ids = torch.zeros(64, dtype=torch.int64)
    tokens = TokenBatch(old, advantages, torch.arange(64) % 3 > 0, ids, ids[:1], importance_weights=weights)
    terms = loss_terms(config.method_class(config), config, tokens, {"logprobs": logprobs, "entropy": entropy}, 1)
    losses, slopes, count = [], [], 0
    for index in range(64):
        advantage, weight = advantages[index].item(), weights[index].item()
        ratio = math.exp(logprobs[index].item() - old[index].item())
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
        loss, slope = (plain, plain) if plain >= clipped else (clipped, 0.0)
        if dual_clip is not None and advantage < 0 and loss > -dual_clip * advantage:
            loss, slope = -dual_clip * advantage, 0.0
        kept = index % 3 > 0
        count += kept
        losses.append(kept * weight * loss)
        slopes.append(kept * weight * slope)
    assert terms.surrogate.item() == pytest.approx(sum(losses) / count)
    gradient = torch.autograd.grad(terms.outcome, logprobs)[0]
    assert gradient.tolist() == pytest.approx([slope / count for slope in slopes])
    bonus = 0.5 * entropy[tokens.mask].mean().item()
    assert terms.outcome.item() == pytest.approx(sum(losses) / count - bonus)


def test_older_rows_may_differ_and_their_age_is_logged(model_path):
    learner = learner_of(model_path, max_logprob_gap=None, importance_cap=CAP)
    results = update(learner, groups_of(versions=(VERSION - 1, VERSION - 2)))
    assert float(results["engine"]["logprob_gap"]) == 0
    assert float(results["rows"]["staleness_max"]) == 2
    assert 1.4 < float(results["rows"]["staleness_mean"]) < 1.6


def test_rows_of_the_current_weights_must_agree_beside_older_ones(model_path):
    learner = learner_of(model_path, max_logprob_gap=None, importance_cap=CAP)
    with pytest.raises(WeightSyncError, match=r"disagree by .* nats a token"):
        update(learner, groups_of(versions=(VERSION - 1, VERSION)))


def test_log_probabilities_that_are_no_numbers_stop_the_run_in_older_rows_too(model_path):
    learner = learner_of(model_path, importance_cap=CAP)
    with pytest.raises(WeightSyncError, match="disagree by nan nats"):
        update(learner, groups_of(behaviour=lambda rng: math.nan, versions=(VERSION - 1,)))

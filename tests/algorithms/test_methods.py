"""Each method's loss and gradient, from trajectory groups to microbatches, against float64 loops: a table of cases."""

import itertools
from functools import partial

import method_reference as ref
import pytest
import torch
from method_updates import learner_losses, random_update, reference_gradients, reference_losses, scored_rows

from trial_ray.algorithms.methods import method_names, new_config
from trial_ray.learner.method import Divergence, Method

ITERATION = 30
"""Iteration of the cases without a schedule."""


def each_gets(name, values_of):
    """Return a preparation that sets an attribute of each turn."""

    def fill(turns):
        for turn, value in zip(turns, values_of(turns), strict=True):
            setattr(turn, name, value)

    return fill


weighted, own_advantages = partial(each_gets, "weight"), partial(each_gets, "advantage")


def weigh_tokens(turns):
    """By importance weights below, at and above 1."""
    for turn in turns:
        for place, token in enumerate(turn.tokens):
            token.importance = 0.5 * place


def case(method, loss=ref.grpo, prepare=None, iteration=ITERATION, **training):
    """Return a method, its loss as a loop, and the settings with which both are compared."""
    return method, loss, prepare, iteration, training


def advantage_case(method, advantages, own=(), **settings):
    """Return a case of a method that differs in its advantages; the loop has the names of the settings."""
    return case(method, prepare=own_advantages(partial(advantages, **settings)), **settings, **dict(own))


def trial(coefficient, alpha=1.0):
    return lambda turns: ref.trial(turns, coefficient, alpha)[0]


TRIAL = {"method": "trial", "prepare": weighted(ref.relative_weights)}
CASES = [
    advantage_case("grpo", ref.row_advantages, advantage_statistics="rows"),
    case("grpo", partial(ref.grpo, dual=None), dual_clip=None),
    case("grpo", partial(ref.grpo, clips=(0.9, 1.5)), clip_low=0.1, clip_high=0.5),
    case("grpo", partial(ref.grpo, kl=0.5), ref_kl_coeff=0.5),
    case("grpo", partial(ref.grpo, kl=0.0, entropy=0.2), ref_kl_coeff=0.0, entropy_coeff=0.2),
    *(
        # GSPO's ratio and the three means; the maximum response length is 512 tokens by default.
        case(
            "grpo", partial(ref.grpo, level=level, how=how), weigh_tokens,
            ratio_level=level, surrogate_mean=how, importance_cap=2.0,
        )
        for level, how in itertools.product(("token", "sequence"), ("tokens", "rows", "fixed_length"))
    ),
    # λ = 0.01 from iteration 25 on, as published, and larger λ, so that the clamp acts on both sides of its bound.
    case(loss=trial(0.0), iteration=24, **TRIAL),
    case(loss=trial(0.01), iteration=25, **TRIAL),
    *(
        case(loss=trial(coefficient, alpha), hindsight_coeff=coefficient, clamp_alpha=alpha, **TRIAL)
        for coefficient, alpha in ((0.3, 1.0), (2.0, 0.5), (2.0, 1e9))
    ),
    case("uniform", trial(0.3), weighted(lambda turns: [1.0] * len(turns)), hindsight_coeff=0.3),
    *(
        case(method, partial(loss, strength=strength), iteration=iteration)
        for method, loss, schedule in (
            ("rlsd", ref.rlsd, {1: 0.495, 99: 0.005, 150: 0.0}),
            ("serl", ref.serl, {1: 0.5, 50: 0.01, 150: 0.0}),
        )
        for iteration, strength in schedule.items()
    ),
    case("sdar", ref.sdar),
    case("grpo_opsd", ref.grpo_opsd),
    case("opsd", ref.opsd_sampled, divergence="sampled"),
    case("opsd", ref.opsd_jsd),
    case("opd", partial(ref.opd, clip=0.5, coefficient=0.7), distillation_clip=0.5, outcome_coeff=0.7),
    # In iteration 30 of 60 the first half of the longest rollout's turns is distilled.
    case("opd", ref.opd, weighted(partial(ref.first_turns, share=0.5)), curriculum_iterations=60),
    case("opd", ref.opsd_jsd, divergence="jsd"),
    advantage_case("rft", ref.accepted, reward_threshold=1.0),
    advantage_case("rft", ref.accepted, {"reward": "score"}, reward_threshold=0.2),
    # Both released modes, with the released statistics over rows and with those over trajectories.
    advantage_case("gigpo", ref.gigpo_advantages),
    *(
        advantage_case(
            "gigpo", ref.gigpo_advantages, advantage_norm=norm, advantage_statistics=statistics, reward=reward,
            step_coeff=0.3, step_discount=0.5,
        )
        for norm, statistics, reward in (
            ("mean_std_norm", "rows", "score"), ("mean_norm", "rows", "success"), ("mean_norm", "trajectories", "return"),
        )
    ),
    *(
        advantage_case("grpo", ref.per_turn_advantages, {"reward": "per_turn"}, **own)
        for own in ({}, {"advantage_norm": "mean_norm", "turn_coeff": 0.3, "turn_discount": 0.0})
    ),
    *(
        advantage_case("agentopsd", ref.agentopsd_advantages, **own)
        for own in ({}, {"revision_mix": 0.3, "revision_bound": 0.9, "belief_decay": 0.5})
    ),
    *(
        # λ of the first iteration is a step below 0.2, as released.
        case(
            "stepopsd", partial(ref.stepopsd, strength=strength),
            weighted(partial(ref.step_factors, strength=strength)), iteration,
        )
        for iteration, strength in ((1, 0.196), (25, 0.1), (150, 0.0))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "loss", "prepare", "iteration", "training"), CASES)
def test_loss_and_gradient_equal_the_loops(method, loss, prepare, iteration, training):
    for seed in range(2):
        update = random_update(seed)
        own_advantages(ref.row_advantages)(update.turns)
        if prepare is not None:
            prepare(update.turns)
        losses, leaves = learner_losses(method, update, iteration, training)
        loop = reference_losses(update, loss)
        expected = [loop.detach(), *(reference_gradients(loop, update.tokens, name) for name in leaves)]
        found = [losses.detach(), *torch.autograd.grad(losses.sum(), [*leaves.values()], materialize_grads=True)]
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


def test_full_vocabulary_opsd_has_the_published_divergence():
    config = new_config("opsd")
    assert config.method_class(config).divergence == Divergence(mix=0.5, temperature=1.1)


def test_methods_without_a_clamp_are_computed_in_parts():
    methods = {name: new_config(name) for name in method_names()}
    clamped = {name for name, config in methods.items() if not config.method_class(config).adds_up(ITERATION)}
    assert clamped == {"trial", "uniform", "permuted"}
    for hook in ("token_advantages", "surrogate", "log_ratios", "dense_loss"):
        assert not type("Own", (Method,), {hook: None})(methods["grpo"]).adds_up(ITERATION), hook


def test_permuted_weights_follow_the_seed_and_the_iteration():
    update, drawn = random_update(2), {}  # whose weights in a trajectory differ
    for seed, iteration in ((None, 1), (2**32, 1), (2**32, 1), (2**32, 2), (-1, 1)):
        config = new_config("permuted").debugging(seed=seed)
        rows = scored_rows(update, config)
        config.method_class(config).prepare(rows, update.groups, iteration)
        assert torch.equal(drawn.setdefault((seed, iteration), rows.weights), rows.weights)
    assert not any(torch.equal(first, second) for first, second in itertools.combinations(drawn.values(), 2))
